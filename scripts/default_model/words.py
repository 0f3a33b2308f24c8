"""Word lists for the prompts: plain, everyday English."""


def _entries(text: str) -> list[str]:
    """The entries of a list written with bars and free line breaks."""
    return " ".join(text.split()).split(" | ")


NAMES = _entries(
    """
    Tom | Anna | Ben | Lily | Max | Mia | Sam | Lucy | Jack | Emma | Leo | Rosie | Tim | Sara | Dan | Nora | Finn |
    Ella | Oscar | Grace | Hugo | Ruby | Noah | Clara | Peter | Alice | Henry | Molly | Jim | Kate | Felix | Daisy |
    Toby | Hannah | Charlie | Maya | Simon | Ivy | George | Zoe | Arthur | Poppy | Ned | Olive | Will | Nina |
    Oliver | Bella | Paul | Jane | Robin | Amy | Milo | Sophie | Harry | Eva | Theo | Pip | Wendy | Carl
    """
)

ANIMALS = _entries(
    """
    dog | cat | rabbit | fox | bear | mouse | duck | horse | cow | pig | sheep | goat | frog | owl | bird | squirrel
    | hedgehog | turtle | lion | elephant | monkey | penguin | whale | dolphin | bee | butterfly | snail | ant |
    donkey | kitten | puppy | chick | deer | wolf | otter | beaver | hen | goose | parrot | crab | fish | giraffe |
    tiger | mole | robin | badger
    """
)

PEOPLE = _entries(
    """
    farmer | baker | teacher | doctor | sailor | gardener | painter | shepherd | fisherman | king | queen | postman
    | nurse | carpenter | cook | clockmaker | tailor | miller | grandmother | grandfather | boy | girl | old man |
    old woman | young prince | young princess | wizard | shopkeeper | bus driver | musician | librarian | astronaut
    | pilot | captain | scientist | firefighter | builder | singer | knight
    """
)

QUALITIES = _entries(
    """
    little | small | brave | shy | kind | curious | lazy | clever | lonely | happy | sad | hungry | quiet | proud |
    gentle | sleepy | old | young | funny | friendly | careful | grumpy | cheerful | tiny | big | patient | silly |
    busy | tired | polite
    """
)

OBJECTS = _entries(
    """
    red ball | golden key | wooden box | lost hat | blue kite | old map | silver coin | warm blanket | small boat |
    broken clock | magic seed | big umbrella | shiny stone | paper plane | tiny bell | strange letter | toy train |
    apple pie | yellow scarf | glass bottle | little lamp | green door | old book | music box | wooden bridge |
    birthday cake | red bicycle | pair of boots | tall ladder | jar of honey | drum | basket of apples | garden gate
    | snow globe | flute | candle | pumpkin | teddy bear | feather | picture | bucket | rope | lantern | mirror |
    puzzle | box of crayons | loaf of bread | silver spoon | new pair of shoes | letter from a friend | sunflower |
    big red balloon
    """
)

PLACES = _entries(
    """
    in a small village | near a big forest | by the sea | on a farm | in a quiet town | at the edge of a lake | on a
    green hill | in a little house | in a tall tree | under an old bridge | in a busy city | beside a river | high
    in the mountains | on a small island | in a sunny garden | behind the school | near the market | in a warm
    burrow | at the end of a long road | in an old castle | next to the library | in the park | in a field of
    flowers | in a cozy cottage
    """
)

ACTIVITIES = _entries(
    """
    play in the rain | sing songs | look at the stars | bake bread | climb trees | read books | swim in the pond |
    paint pictures | tell stories | run in the fields | collect shells | dance | help other people | sleep in the
    sun | build things | plant flowers | fly a kite | ask questions | go for long walks | watch the clouds | make
    new friends | eat apples | count the stars | play hide and seek | draw | cook soup | listen to music | jump over
    puddles | ride a bicycle | look for treasure | watch the birds | make little boats
    """
)

EVENTS = _entries(
    """
    it started to rain | the lights went out | a loud noise came from the garden | a stranger came to the door | it
    began to snow | the river rose | the wind blew very hard | someone called for help | a letter came | the sun did
    not come up | the bridge broke | all the apples were gone | a bird fell from its nest | the door was open |
    there was a big storm | the market was empty | a friend got lost in the woods | something small and bright fell
    from the sky | the boat began to sink | the cake was missing | the well ran dry | a new family moved in next
    door | the old clock stopped | the path was covered with leaves
    """
)

LESSONS = _entries(
    """
    being kind | telling the truth | sharing with others | being brave | working together | being patient | saying
    sorry | helping a friend | trying again | listening to others | not giving up | saying thank you | taking care
    of nature | keeping a promise | making a new friend | learning something new | being yourself | asking for help
    | forgiving a friend | waiting your turn
    """
)

THINGS = _entries(
    """
    rain | snow | the sun | the moon | a star | a river | a mountain | a tree | a flower | a cloud | the wind | the
    sea | a bee | a bird | a fish | a cat | a dog | a horse | a cow | an elephant | milk | bread | cheese | honey |
    salt | sugar | water | ice | fire | wood | glass | paper | a book | a clock | a wheel | a bridge | a boat | a
    train | a car | a bicycle | an airplane | a house | a school | a hospital | a market | a farm | a garden | a
    forest | a desert | an island | a lake | a rainbow | thunder | a shadow | a map | money | music | a drum | a
    song | a story | a friend | a family | a teacher | a doctor | a farmer | sleep | a dream | time | a year |
    summer | winter | spring | autumn | the night | a seed | a leaf | a root | an egg | a nest | wool | a shoe | a
    coat | a hat | a key | a door | a window | a lamp | a candle | a mirror | a letter | a telephone | a computer |
    a camera | a radio | a language | a number | a color | a circle | a magnet | a volcano | an earthquake | a
    planet | the earth | gravity | light | sound | heat | air | a heart | a bone | the brain | an eye | an ear | a
    tooth | food | soup | a cake | tea | an apple | an orange | a potato | rice | corn | a turtle | a frog | a
    butterfly | a spider | an ant | a snail | a whale | a lion | a bear | a library | a museum | a park | a zoo | a
    city | a village | a country | a road | a game | a toy | a ball | a kite | a puzzle | a birthday | a holiday | a
    gift | kindness | courage | patience | trust | work | a team | a rule | a question | an idea | a plan | a
    mistake | a secret
    """
)

QUESTIONS = _entries(
    """
    Why is the sky blue? | Why do birds fly south in winter? | Why do we sleep? | Why do leaves change color? | Why
    do cats purr? | Why is the sea salty? | How do plants grow? | How do fish breathe? | How do bees make honey? |
    How does a boat float? | How does a bicycle work? | How do airplanes fly? | How does the moon shine? | Where
    does rain come from? | Where does bread come from? | Where does milk come from? | What do cows eat? | What do
    bears do in winter? | What do plants need to live? | What makes a good friend? | What is your favorite season
    and why? | What can we do on a rainy day? | What should I eat for breakfast? | What should I take to the beach?
    | What animals live on a farm? | What animals live in the forest? | Which is bigger, the sun or the moon? | Who
    works in a hospital? | Who lives in a castle? | When do flowers bloom? | How many days are in a week? | How many
    seasons are there? | What is the capital of France? | What do doctors do? | What do teachers do? | Why should we
    brush our teeth? | Why do we need water? | Why is reading good for you? | Why do people keep pets? | Why do we
    have day and night? | How can I make a new friend? | How can I be kind today? | How can I learn faster? | How
    can I sleep better? | How can I help at home? | How can we take care of the earth? | What is the best way to say
    sorry? | What can I do when I am sad? | What can I do when I am bored? | What is a good name for a puppy? | What
    is a good gift for a friend? | What games can we play outside? | Is it good to eat fruit every day? | Can fish
    sleep? | Can dogs see colors? | Do trees sleep in winter? | Do all birds fly? | Are spiders insects? | Is the
    moon a star? | Why do we laugh?
    """
)

TASKS = _entries(
    """
    make a cup of tea | bake a simple cake | make a sandwich | boil an egg | cook rice | make vegetable soup | wash
    the dishes | clean a room | plant a seed | water a garden | take care of a dog | take care of a cat | build a
    paper boat | make a paper plane | fly a kite | ride a bicycle | tie a shoe | write a letter | wrap a gift | plan
    a picnic | pack a bag for a trip | make a snowman | draw a house | draw a cat | learn a new word | read a map |
    make pancakes | make fruit salad | make lemonade | set the table | fold a shirt | paint a wall | feed the birds
    | grow tomatoes | make a birthday card | get ready for school | save money | cross the road safely | calm down |
    make a bed | wash your hands | make hot chocolate | roast potatoes | bake cookies | build a sand castle
    """
)

LISTS = _entries(
    """
    things you can find in a kitchen | animals that live on a farm | animals that live in the sea | things to do on
    a rainy day | things to do on a sunny day | fruits | vegetables | colors | jobs | games for children | ways to
    be kind | ways to help at home | things to take on a trip | things you can see in the sky | things you can find
    in a forest | foods for breakfast | reasons to read books | reasons to go for a walk | tools in a garden | kinds
    of weather | musical instruments | ways to save water | good habits | gifts for a friend | things that make
    people happy | places to visit in a city | things that fly | things that are round | things that are cold |
    things you need for school | names for a puppy | ideas for a story | ways to say hello
    """
)

SCENES = _entries(
    """
    a quiet village | a busy market | a garden | a beach | a forest | a small kitchen | a farm | a mountain lake |
    an old castle | a city street | a train station | a school | a library | a bakery | a snowy field | a river | a
    harbor | an island | a park | a cottage | a desert | a waterfall | a barn | a toy shop | a classroom | a bedroom
    | a bridge | a meadow | a lighthouse | a flower shop
    """
)

TIMES = _entries(
    """
    in the morning | at night | in the evening | in spring | in summer | in autumn | in winter | after the rain |
    before a storm | on a sunny day | on a cold day | at noon | early in the day | on a foggy morning | when the
    snow falls
    """
)

OCCASIONS = _entries(
    """
    a trip to the sea | a new puppy | a birthday party | the first day at school | a day on the farm | a new house |
    the summer holidays | a picnic in the park | a walk in the forest | the first snow | a good book | a new friend
    | a visit to the zoo | a family dinner | a lost cat | a school play | the new garden | a rainy weekend | a train
    ride | a football game | learning to swim | a gift that came by post | a long walk in the hills | baking bread
    """
)

HABITS = _entries(
    """
    read every day | eat fruit | go to bed early | drink water | tell the truth | share your toys | walk in nature |
    say thank you | help your neighbors | learn a new language | brush your teeth | ask questions | play outside |
    listen to music | write in a diary | save money | plant trees | be kind to animals | wash your hands | take a
    break | keep your room clean | try new things | plan your day | call your grandparents | be patient | work
    together
    """
)
