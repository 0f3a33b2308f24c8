"""Examples as token rows: the raw text or the chat form of each, several to a row, every row begun by a fresh one."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from default_model.corpus import Example
from default_model.vocabulary import ASSISTANT, END, SYSTEM, USER

RAW_SHARE = 0.4
SYSTEM_SHARE = 0.1
SYSTEM_MESSAGES = [
    "You are a helpful assistant.",
    "You are a kind and helpful assistant.",
    "Answer in simple words.",
    "You write short texts in simple words.",
]


@dataclass(frozen=True)
class Specials:
    """Ids of the special tokens."""

    end: int
    user: int
    assistant: int
    system: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Specials":
        """Look them up."""
        return cls(*(tokenizer.token_to_id(token) for token in (END, USER, ASSISTANT, SYSTEM)))


@dataclass(frozen=True)
class Encoded:
    """Examples as ids; a prompt and its answer share an index."""

    prompts: list[np.ndarray]
    answers: list[np.ndarray]
    systems: list[np.ndarray]
    can_be_raw: list[bool]
    specials: Specials

    def chat_prompt(self, index: int) -> np.ndarray:
        """The user's turn and the mark that begins the answer."""
        marks = self.specials
        return np.concatenate([[marks.user], self.prompts[index], [marks.end, marks.assistant]])

    def document(self, index: int, pick: np.random.Generator) -> np.ndarray:
        """One example in a random form, with its end token."""
        marks, answer = self.specials, self.answers[index]
        if self.can_be_raw[index] and pick.random() < RAW_SHARE:
            return np.append(answer, marks.end)
        turns = np.concatenate([self.chat_prompt(index), answer, [marks.end]])
        if pick.random() < SYSTEM_SHARE:
            system = self.systems[pick.integers(len(self.systems))]
            return np.concatenate([[marks.system], system, [marks.end], turns])
        return turns


def encode(tokenizer: Tokenizer, examples: list[Example]) -> Encoded:
    """Tokenise prompts and answers once."""

    def ids(texts: list[str]) -> list[np.ndarray]:
        return [np.array(encoding.ids, dtype=np.int64) for encoding in tokenizer.encode_batch_fast(texts)]

    return Encoded(
        prompts=ids([example.prompt for example in examples]),
        answers=ids([example.answer for example in examples]),
        systems=ids(SYSTEM_MESSAGES),
        can_be_raw=[example.kind != "small_talk" for example in examples],
        specials=Specials.of(tokenizer),
    )


def rows(encoded: Encoded, row_len: int, seed: int) -> Iterator[np.ndarray]:
    """Endless rows [row_len + 1]: whole documents, the last one cut; the cut one begins the next row afresh."""
    pick = np.random.default_rng(seed)
    parts: list[np.ndarray] = []
    while True:
        for index in pick.permutation(len(encoded.answers)):
            document = encoded.document(int(index), pick)
            parts.append(document)
            if sum(map(len, parts)) > row_len:
                yield np.concatenate(parts)[: row_len + 1]
                parts = [document] if len(document) <= row_len else []


def batches(encoded: Encoded, num_rows: int, row_len: int, seed: int) -> Iterator[np.ndarray]:
    """Endless batches [num_rows, row_len + 1]."""
    source = rows(encoded, row_len, seed)
    while True:
        yield np.stack([next(source) for _ in range(num_rows)])
