"""The measurement: greedy speculative decoding of one prompt at a time, slow and obvious, from the saved files.

The target runs over the whole text every round and the drafter over all its slots: no cache that could be wrong.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from default_model.eagle3 import Drafter, attend, load_drafter
from default_model.llama import Llama, load_llama
from default_model.vocabulary import ASSISTANT, END, USER

RAW_PROMPTS = [
    "Once upon a time",
    "The little dog ran",
    "One day, a girl named Anna",
    "It was a cold winter morning and",
    "The sun is",
    "My best friend",
    "In the forest, there was an old house.",
    "A good way to learn is",
    "The farmer had a cow that",
    "Dear Tom,",
    "There once was a brave knight who",
    "Bees are",
    "To make a good soup,",
    "The old man looked at the sea and",
    "Ben and Lily went to the park.",
    "Water is important because",
    "The cat sat on",
    "At the end of the day,",
    "Every morning, the baker",
    '"Where are you going?" asked the fox.',
]
# Written after the training prompts and checked to be none of them.
CHAT_PROMPTS = [
    "Tell me something nice about cats.",
    "My dog is sick. What should I do?",
    "Write two sentences about a red car.",
    "What is the difference between a lake and the sea?",
    "Tell me a story in which a boy plants a seed that grows into the sky.",
    "I am going to visit my aunt. What can I bring her?",
    "Can you write a story about two sisters and a bear?",
    "Which fruit is good for children?",
    "What happens when ice gets warm?",
    "Write a story that begins in a train.",
    "Say something about winter in the mountains.",
    "Give me an idea for a birthday party.",
    "Why are some people afraid of the dark?",
    "Tell me how a baker makes bread.",
    "Write a short message for my teacher.",
    "What do you see when you look out of a window?",
    "Tell me a story about a king who could not sleep.",
    "How do people build a house?",
    "What would a cat say to a mouse?",
    "Please describe an old man who sells apples.",
]
# Requests that the drafter met in training, word for word (its figure is not one of unseen text), or nearly so.
FAMILIAR_PROMPTS = [
    "Tell me a story.",
    "Tell me a short story about a brave mouse.",
    "What is the moon?",
    "How do I make a cup of tea?",
    "Why is it good to read every day?",
    "Write a short letter to Anna about a trip to the sea.",
    "List five animals that live on a farm.",
    "Describe a garden in spring.",
    "Write a short talk between a fox and a hen.",
    "Who are you?",
    "Hello!",
    "What do bees do?",
    "Tell me about trees.",
    "How can I be kind today?",
    "Write a story about a lost ball.",
    "Why do we sleep?",
    "What should I take to the beach?",
    "Explain in simple words what a river is.",
    "Tell me a bedtime story about a sleepy bear.",
    "What can I do on a rainy day?",
]


@dataclass
class Tally:
    """Rounds, and how often draft i was tried (all before it were right) and accepted."""

    num_rounds: int = 0
    num_tokens: int = 0
    tried: Counter = field(default_factory=Counter)
    accepted: Counter = field(default_factory=Counter)

    def add(self, draft: list[int], num_accepted: int, num_committed: int) -> None:
        """Count one round."""
        self.num_rounds += 1
        self.num_tokens += num_committed
        for place in range(min(num_accepted + 1, len(draft))):
            self.tried[place] += 1
            self.accepted[place] += place < num_accepted

    def join(self, other: "Tally") -> None:
        """Add another tally's counts."""
        self.num_rounds += other.num_rounds
        self.num_tokens += other.num_tokens
        self.tried.update(other.tried)
        self.accepted.update(other.accepted)

    def line(self) -> str:
        """Accept length, then the acceptance of each draft position given that the ones before were right."""
        places = " ".join(f"{self.accepted[place] / self.tried[place]:.3f}" for place in sorted(self.tried))
        return (
            f"accept length {self.num_tokens / self.num_rounds:.2f} over {self.num_rounds} rounds; by position {places}"
        )


class Pair:
    """A target and its drafter, read from their folders."""

    def __init__(self, target: Path, drafter: Path):
        self.tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
        self.target: Llama = load_llama(target).eval()
        self.drafter: Drafter
        self.drafter, self.target_ids = load_drafter(drafter)
        self.end = self.tokenizer.token_to_id(END)

    def look(self, tokens: list[int]) -> tuple[list[int], Tensor]:
        """The target's greedy choice after every token, and its taps [1, S, num_taps * H]."""
        state, taps = self.target(torch.tensor([tokens]), self.drafter.shape.taps)
        return self.target.logits(state)[0].argmax(-1).tolist(), torch.cat(taps, dim=-1)

    def draft(self, tokens: list[int], taps: Tensor, num_drafts: int) -> list[int]:
        """Drafts after `tokens`, whose last one the target has chosen but not yet seen: taps cover the rest."""
        drafter, num_slots = self.drafter, len(tokens) - 1
        embed = self.target.model.embed_tokens
        hidden = drafter.fc(taps)  # [1, num_slots, H]
        query, key, value = drafter.midlayer.project(
            embed(torch.tensor([tokens[1:]])), hidden, drafter.tables(0, num_slots)
        )
        causal = torch.ones(1, 1, num_slots, num_slots, dtype=torch.bool).tril()
        state = drafter.midlayer.finish(hidden, attend(query, [key], [value], causal))[:, -1:]
        drafts: list[int] = []
        while True:
            best = drafter.lm_head(drafter.norm(state))[0, 0].argmax()
            drafts.append(int(self.target_ids[best]))
            if len(drafts) == num_drafts:
                return drafts
            state, key, value = self._extend(drafts, drafter.feed_back(state), key, value)

    def _extend(self, drafts: list[int], hidden: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One more slot: the last draft's embedding with the last state; returns the new state, keys and values."""
        layer, position = self.drafter.midlayer, key.shape[2]
        embedded = self.target.model.embed_tokens(torch.tensor([[drafts[-1]]]))
        query, new_key, new_value = layer.project(embedded, hidden, self.drafter.tables(position, 1))
        key, value = torch.cat([key, new_key], dim=2), torch.cat([value, new_value], dim=2)
        everything = torch.ones(1, 1, 1, position + 1, dtype=torch.bool)
        return layer.finish(hidden, attend(query, [key], [value], everything)), key, value

    def generate(self, prompt: list[int], max_new: int, num_drafts: int, tally: Tally) -> list[int]:
        """Greedy speculative decoding; the result is the target's own greedy text."""
        choices, taps = self.look(prompt)
        tokens = [*prompt, choices[-1]]
        while len(tokens) - len(prompt) < max_new and tokens[-1] != self.end:
            draft = self.draft(tokens, taps, num_drafts)
            choices, taps = self.look([*tokens, *draft])
            wanted = choices[len(tokens) - 1 :]  # the target's choice after the last token and after each draft
            num_accepted = 0
            while num_accepted < num_drafts and draft[num_accepted] == wanted[num_accepted]:
                num_accepted += 1
            committed = wanted[: num_accepted + 1]
            if self.end in committed:
                committed = committed[: committed.index(self.end) + 1]
            tally.add(draft, num_accepted, len(committed))
            tokens += committed
            taps = taps[:, : len(tokens) - 1]
        return tokens[len(prompt) :]

    def plain(self, prompt: list[int], max_new: int) -> list[int]:
        """Greedy decoding without drafts, for the comparison."""
        tokens = list(prompt)
        while len(tokens) - len(prompt) < max_new and (tokens[-1] != self.end or len(tokens) == len(prompt)):
            tokens.append(self.look(tokens)[0][-1])
        return tokens[len(prompt) :]


@torch.inference_mode()
def measure(target: Path, drafter: Path, num_drafts: int, max_new: int, check: bool) -> None:
    """Print sample texts and the accept length on raw prompts, unseen chat prompts and familiar chat prompts."""
    pair = Pair(target, drafter)
    groups = {"raw": RAW_PROMPTS, "chat": CHAT_PROMPTS, "familiar chat": FAMILIAR_PROMPTS}
    for name, prompts in groups.items():
        tally = Tally()
        for text in prompts:
            asked = text if name == "raw" else f"{USER}{text}{END}{ASSISTANT}"
            prompt, own = pair.tokenizer.encode(asked).ids, Tally()
            written = pair.generate(prompt, max_new, num_drafts, own)
            if check:
                assert pair.plain(prompt, max_new) == written[:max_new], "speculation changed the text"
            tally.join(own)
            length = own.num_tokens / max(1, own.num_rounds)
            print(f"[{name}, {length:.2f}] {text} ... {pair.tokenizer.decode(written, skip_special_tokens=False)!r}")
        print(f"{name}: {tally.line()}")
