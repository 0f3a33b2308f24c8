"""What the models are asked: our own texts, a JSONL file of the user's, or random ids where there is no tokenizer."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.checkpoints.checkpoint import load_tokenizer, open_checkpoint
from outrider.tokenizer import Tokenizer


@dataclass(frozen=True)
class PromptText:
    """One prompt before it is tokens: ids as they are, or text, which a chat template may surround."""

    text: str = ""
    ids: tuple[int, ...] = ()
    is_chat: bool | None = None  # None: through the chat template, if there is one


@dataclass(frozen=True)
class PromptChoice:
    """What a user chose about prompts."""

    texts: Sequence[PromptText] | None = None  # None: our own
    chat: bool | None = None  # all of them through the chat template, or none; None: as each of them says


@dataclass(frozen=True)
class PromptVocabulary:
    """What is needed to turn prompts into ids, and the model's size, read without loading any weight."""

    tokenizer: Tokenizer | None
    size: int
    num_parameters: int = 0

    @classmethod
    def of(cls, model: str | Path) -> PromptVocabulary:
        checkpoint = open_checkpoint(model)
        try:
            tokenizer = load_tokenizer(checkpoint)
            size = checkpoint.config.get("vocab_size") or (tokenizer.vocab_size if tokenizer is not None else 0)
            num_parameters = sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names())
        finally:
            checkpoint.close()
        if not size:
            raise ValueError(f"{model}: config.json lacks vocab_size; add it")
        return cls(tokenizer, int(size), num_parameters)

    def encode(self, prompt: PromptText, chat: bool | None = None) -> list[int]:
        """Token ids. `chat` overrides what the prompt says about the chat template."""
        if prompt.ids:
            return list(prompt.ids)
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer, so a prompt cannot be text: give prompt_token_ids instead")
        if chat and not self.tokenizer.has_chat_template:
            raise ValueError("this model has no chat template: leave out --chat, or choose a chat model")
        wanted = chat if chat is not None else prompt.is_chat is not False
        if wanted and self.tokenizer.has_chat_template:
            text = self.tokenizer.chat([{"role": "user", "content": prompt.text}])
            return self.tokenizer.encode(text, add_special_tokens=False)
        return self.tokenizer.encode(prompt.text)

    def encode_all(self, prompts: Sequence[PromptText], chat: bool | None = None) -> list[list[int]]:
        return [self.encode(prompt, chat) for prompt in prompts]


def random_prompts(vocab_size: int, count: int, seed: int = 0) -> list[PromptText]:
    """Ids that mean nothing; every second prompt repeats itself, so that an n-gram drafter has something to find."""
    source = random.Random(seed)
    prompts = []
    for number in range(count):
        block = [source.randrange(vocab_size) for _ in range(source.randrange(11, 19))]
        repeats = 3 if number % 2 == 0 else 1
        tail = [source.randrange(vocab_size) for _ in range(source.randrange(18))] if repeats == 1 else block[:5]
        prompts.append(PromptText(ids=tuple(block * repeats + tail)))
    return prompts


def read_prompts(path: Path) -> list[PromptText]:
    """One prompt a line: {"prompt": text}, {"turns": [text, ...]} or {"prompt_token_ids": [...]}."""
    prompts = list(_lines(path))
    if not prompts:
        raise ValueError(f'{path} holds no prompt: write one JSON object a line, such as {{"prompt": "..."}}')
    return prompts


def _lines(path: Path) -> Iterator[PromptText]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                yield _prompt(json.loads(line))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error


def _prompt(entry: Any) -> PromptText:
    if not isinstance(entry, dict):
        raise ValueError("not a JSON object")
    if isinstance(ids := entry.get("prompt_token_ids"), list) and ids:
        if not all(type(token) is int and token >= 0 for token in ids):
            raise ValueError("prompt_token_ids must be whole numbers")
        return PromptText(ids=tuple(ids))
    if isinstance(text := entry.get("prompt"), str) and text:
        return PromptText(text)
    turns = entry.get("turns")
    if isinstance(turns, list) and turns and isinstance(turns[0], str) and turns[0]:
        return PromptText(turns[0], is_chat=True)
    raise ValueError('needs "prompt" (a text), "turns" (texts, the first is used) or "prompt_token_ids" (a list)')


CHAT = (
    "Explain to a child why the sky is blue and why it turns red in the evening.",
    "Give me three ideas for a rainy Sunday afternoon with two small children.",
    "What should I check before I buy a used bicycle?",
    "Write a short letter to a neighbour who plays loud music at night. Stay friendly.",
    "How does a refrigerator keep food cold?",
    "Tell a short story about a lighthouse keeper who finds a message in a bottle.",
    "Compare trains and aeroplanes for a journey of five hundred kilometres.",
    "What is the difference between weather and climate?",
)

REPETITION = (
    """Rename the function `total` to `sum_of_prices` and print the whole file again.

```python
def total(items):
    result = 0
    for item in items:
        result += item.price * item.count
    return result


def average(items):
    if not items:
        return 0
    return total(items) / len(items)


def print_report(items):
    print("total:", total(items))
    print("average:", average(items))
```""",
    """Correct the spelling of this paragraph and repeat it in full.

The old libary at the corner of Mill Street was built by the town in 1912. The old libary has two reading rooms, a
garden and a small tower. The reading rooms are open from nine in the morning to six in the evening, and the garden is
open all day. Every Saturday the old libary at the corner of Mill Street opens its tower, and from the tower visitors
can see the river, the bridge and the hills behind the town.""",
    """Copy this list, with every price as it is, and add a line "Total" at the end.

- 12 pencils, price per pencil 0.40
- 12 erasers, price per eraser 0.55
- 12 notebooks, price per notebook 1.90
- 12 rulers, price per ruler 0.75
- 12 folders, price per folder 1.10
- 12 markers, price per marker 1.35""",
    """Summarise the meeting in its own words. Quote the decisions exactly.

Meeting of the garden committee. Decision one: the garden committee will plant forty apple trees along the north wall in
October. Decision two: the garden committee will repair the water tank before the first frost. Decision three: the
garden committee will meet again on the second Monday of November. The members agreed that the apple trees along the
north wall need a fence, and that the water tank needs a new lid.""",
    """Turn this JSON into one with the same keys, in the same order, but with every status set to "done".

[
  {"id": 1, "title": "order the paint", "owner": "Ada", "status": "open"},
  {"id": 2, "title": "paint the door", "owner": "Ben", "status": "open"},
  {"id": 3, "title": "clean the brushes", "owner": "Ada", "status": "open"},
  {"id": 4, "title": "return the ladder", "owner": "Ben", "status": "open"}
]""",
    """Add a type hint to every argument and print the class again.

```python
class Account:
    def __init__(self, owner, balance):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        self.balance = self.balance + amount
        return self.balance

    def withdraw(self, amount):
        self.balance = self.balance - amount
        return self.balance
```""",
    """Repeat the song and replace "river" by "mountain" everywhere.

Down by the river where the tall grass grows,
down by the river where the cold wind blows,
I left my heart by the river, I left my heart by the stone,
down by the river I will never walk alone.""",
    """Write the same steps again, but for tea instead of coffee.

1. Fill the kettle with fresh water and bring the water to the boil.
2. Warm the pot with a little of the hot water and pour the water away.
3. Put two spoons of coffee into the pot and pour the hot water over the coffee.
4. Wait four minutes, stir the coffee once, and pour the coffee into the cups.""",
)

WORKLOADS: dict[str, tuple[str, ...]] = {"chat": CHAT, "repetition": REPETITION}


def workload(name: str, vocabulary: PromptVocabulary) -> list[PromptText]:
    """One of our own sets of prompts, or as many random ones for a model without a tokenizer."""
    if name not in WORKLOADS:
        raise ValueError(f"unknown workload {name!r}; known: {', '.join(WORKLOADS)}")
    if vocabulary.tokenizer is None:
        return random_prompts(vocabulary.size, len(WORKLOADS[name]))
    return [PromptText(text, is_chat=True) for text in WORKLOADS[name]]
