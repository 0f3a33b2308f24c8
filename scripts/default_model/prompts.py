"""Prompts for the teacher, made from word lists: a request, and often the first words of the answer.

The planted opening keeps a small teacher on its subject and makes the corpus far more varied than sampling alone.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from default_model import words


@dataclass(frozen=True)
class Request:
    """What the user says, and how the answer begins (may be empty)."""

    kind: str
    text: str
    opening: str


def article(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _hero(pick: random.Random) -> tuple[str, str]:
    """A noun phrase without article ("little fox") and a name."""
    noun = pick.choice(words.ANIMALS) if pick.random() < 0.6 else pick.choice(words.PEOPLE)
    return f"{pick.choice(words.QUALITIES)} {noun}", pick.choice(words.NAMES)


def story(pick: random.Random) -> Request:
    """A short story with a named hero."""
    hero, name = _hero(pick)
    noun, lived = hero.split(" ", 1)[1], f"there lived {article(hero)} named {name}"
    thing, place = pick.choice(words.OBJECTS), pick.choice(words.PLACES)
    activity, event = pick.choice(words.ACTIVITIES), pick.choice(words.EVENTS)
    other = pick.choice(words.ANIMALS)
    request = pick.choice(
        [
            f"Tell me a short story about {article(hero)} named {name}.",
            f"Tell me a story about {article(hero)} and {article(thing)}.",
            f"Write a short story about {name}, {article(hero)} who lives {place}.",
            f"Write a short and simple story about {article(hero)} who finds {article(thing)}.",
            f"Can you tell me a story about {article(hero)} and {article(other)}?",
            f"Write a story for children. It is about {article(hero)} who likes to {activity}.",
            f"Tell me a bedtime story about {article(hero)}.",
            f"Tell me a story about {pick.choice(words.LESSONS)}.",
            f"Write a short story about {pick.choice(words.LESSONS)}. The hero is {article(hero)} named {name}.",
            "Tell me a story.",
            "Tell me a short story with a happy end.",
        ]
    )
    begin = pick.choice(
        ["Once upon a time, there was", "Once upon a time, there was", "There once was", "Once there was"]
    )
    opening = pick.choice(
        [
            f"{begin} {article(hero)} named {name}. {name} lived {place} and liked to {activity}. One day, {event}.",
            f"{begin} {article(hero)} named {name}. {name} loved to {activity}. One day,",
            f"{begin} {article(hero)} who lived {place}. One day, the {noun} found {article(thing)}.",
            f"Once upon a time, {place}, {lived}. Every day, {name} liked to {activity}.",
            f"Once upon a time, there was {article(hero)}. The {noun}'s name was {name}, and",
            f"{name} was {article(hero)} who lived {place}. One morning, {event}.",
            f"One day, {article(hero)} named {name} went out to {activity}. On the way, {name} met {article(other)}.",
            f'One day, {name} found {article(thing)}. "What is this?" asked {name}.',
            f"{capital(place)}, {lived} and {article(other)}. They were good friends.",
            f"It was a quiet day {place}. {name} the {noun} wanted to {activity}, but {event}.",
        ]
    )
    return Request("story", request, opening)


def explanation(pick: random.Random) -> Request:
    """What something is."""
    thing = pick.choice(words.THINGS)
    request = pick.choice(
        [
            f"What is {thing}?",
            f"Explain in simple words what {thing} is.",
            f"Tell me about {thing}.",
            f"Can you explain {thing} to a child?",
            f"What is {thing}? Answer in two or three short sentences.",
            f"Describe {thing} in simple words.",
            f"Why is {thing} important?",
            f"Write a few simple sentences about {thing}.",
        ]
    )
    opening = capital(thing) + pick.choice([" is", " is", " is something that", ""])
    return Request("explanation", request, opening if opening != capital(thing) else "")


def question(pick: random.Random) -> Request:
    """A simple question."""
    text = pick.choice(words.QUESTIONS)
    return Request("question", text if pick.random() < 0.7 else f"{text} Please answer in simple words.", "")


def how_to(pick: random.Random) -> Request:
    """Steps for an everyday task."""
    task = pick.choice(words.TASKS)
    request = pick.choice(
        [f"How do I {task}?", f"How can I {task}?", f"Tell me how to {task}.", f"Explain step by step how to {task}."]
    )
    opening = pick.choice([f"To {task}, first", f"To {task}, you need", f"Here is how to {task}. First,", "First,", ""])
    return Request("how_to", request, opening)


def letter(pick: random.Random) -> Request:
    """A letter to somebody named."""
    receiver, sender = pick.sample(words.NAMES, 2)
    occasion = pick.choice(words.OCCASIONS)
    request = pick.choice(
        [
            f"Write a short letter from {sender} to {receiver} about {occasion}.",
            f"Write a letter to my friend {receiver} about {occasion}. My name is {sender}.",
            f"Help me write a short note to {receiver} about {occasion}. Sign it with {sender}.",
        ]
    )
    line = pick.choice(
        [
            "I hope you are well.",
            "How are you?",
            "Thank you for your letter.",
            f"I want to tell you about {occasion}.",
            "I",
        ]
    )
    return Request("letter", request, f"Dear {receiver},\n\n{line}")


def listing(pick: random.Random) -> Request:
    """A short list."""
    number, subject = pick.choice(["three", "four", "five", "six"]), pick.choice(words.LISTS)
    request = pick.choice(
        [f"List {number} {subject}.", f"Name {number} {subject}.", f"Give me a list of {number} {subject}."]
    )
    return Request(
        "listing", request, pick.choice([f"Here are {number} {subject}:\n\n1.", "1.", f"{number.capitalize()}"])
    )


def description(pick: random.Random) -> Request:
    """A place at some time."""
    scene, time = pick.choice(words.SCENES), pick.choice(words.TIMES)
    request = pick.choice(
        [f"Describe {scene} {time}.", f"Write a few sentences about {scene} {time}.", f"What is {scene} like {time}?"]
    )
    noun = "The " + scene.split(" ", 1)[1]
    opening = pick.choice(
        [f"{noun} is", f"{capital(time)}, {noun.lower()} is", "", f"{noun} was quiet {time}.", "The air is"]
    )
    return Request("description", request, opening)


def dialogue(pick: random.Random) -> Request:
    """Two characters talk."""
    first, second = pick.sample(words.PEOPLE + words.ANIMALS, 2)
    thing = pick.choice(words.OBJECTS)
    request = pick.choice(
        [
            f"Write a short talk between {article(first)} and {article(second)}.",
            f"Write a short dialogue between {article(first)} and {article(second)} about {article(thing)}.",
        ]
    )
    opening = pick.choice(
        [
            f'"Good morning," said the {first}. "Where are you going?"\n\n"',
            f'"Hello," said the {first}. "Have you seen my {thing}?"\n\n"',
            f'The {first} met the {second} on the road. "',
            f'"Look at this {thing}!" said the {first}.\n\n"',
        ]
    )
    return Request("dialogue", request, opening)


def advice(pick: random.Random) -> Request:
    """Why a habit is good."""
    habit = pick.choice(words.HABITS)
    request = pick.choice(
        [f"Why is it good to {habit}?", f"Why should I {habit}?", f"Write a few sentences about why we should {habit}."]
    )
    opening = pick.choice([f"It is good to {habit} because", f"When you {habit},", f"You should {habit} because", ""])
    return Request("advice", request, opening)


def diary(pick: random.Random) -> Request:
    """A day told by the one who lived it."""
    occasion, event = pick.choice(words.OCCASIONS), pick.choice(words.EVENTS)
    name = pick.choice(words.NAMES)
    request = pick.choice(
        [
            f"Write a short diary page about {occasion}.",
            f"Tell me about your day. It was about {occasion}.",
            f"Write about {occasion} as {name}.",
        ]
    )
    opening = pick.choice(
        [
            f"Today was a special day. It was the day of {occasion}.",
            f"Today, {event}. I",
            f"This morning I woke up early. I was thinking about {occasion}.",
            f"My friend {name} and I had a good day.",
        ]
    )
    return Request("diary", request, opening)


MIXTURE: list[tuple[Callable[[random.Random], Request], float]] = [
    (story, 0.48),
    (explanation, 0.12),
    (question, 0.06),
    (how_to, 0.06),
    (letter, 0.05),
    (listing, 0.04),
    (description, 0.07),
    (dialogue, 0.05),
    (advice, 0.04),
    (diary, 0.03),
]


def requests(seed: int) -> Iterator[Request]:
    """An endless stream of requests; the same seed gives the same stream."""
    pick = random.Random(seed)
    makers, weights = zip(*MIXTURE, strict=True)
    while True:
        yield pick.choices(makers, weights)[0](pick)
