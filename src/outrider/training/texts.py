"""Texts as tokens, with what of them the target said itself; kept in one file; packed into rows of one length."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor


@dataclass(frozen=True)
class Text:
    tokens: np.ndarray  # int32
    learnt: np.ndarray  # bool: the token after this one is the target's own choice

    @classmethod
    def of(cls, tokens: Sequence[int], said: Sequence[bool]) -> Text:
        """`said`: whether the target said this token."""
        learnt = np.zeros(len(tokens), dtype=bool)
        learnt[:-1] = np.array(said[1:], dtype=bool)
        return cls(np.array(tokens, dtype=np.int32), learnt)

    def cut(self, length: int) -> Text:
        if len(self.tokens) <= length:
            return self
        learnt = self.learnt[:length].copy()
        learnt[-1] = False  # the token after it is not there
        return Text(self.tokens[:length], learnt)


def save_texts(path: Path, texts: Sequence[Text], settings: dict[str, Any]) -> None:
    """`settings`: what they came from, to know them again."""
    arrays = {
        "tokens": np.concatenate([text.tokens for text in texts]),
        "learnt": np.concatenate([text.learnt for text in texts]),
        "lengths": np.array([len(text.tokens) for text in texts], dtype=np.int64),
    }
    save_file(arrays, str(path), {"settings": json.dumps(settings, sort_keys=True)})


def load_texts(path: Path, settings: dict[str, Any]) -> list[Text] | None:
    """None where there are none that came from the same settings."""
    if not path.is_file():
        return None
    with safe_open(str(path), "numpy") as file:
        if (file.metadata() or {}).get("settings") != json.dumps(settings, sort_keys=True):
            return None
    return read_texts(path)


def read_texts(path: Path, vocab_size: int | None = None) -> list[Text]:
    """Whatever they came from. `vocab_size`: of the target that is to know them."""
    try:
        with safe_open(str(path), "numpy") as file:
            tokens, learnt, lengths = (file.get_tensor(name) for name in ("tokens", "learnt", "lengths"))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} holds no texts of a run ({error}): give the texts.safetensors of one") from error
    if vocab_size is not None and len(tokens) and int(tokens.max()) >= vocab_size:
        raise ValueError(
            f"{path} holds token {int(tokens.max())}, and the target knows {vocab_size}: it was another target's run"
        )
    ends = np.cumsum(lengths)
    return [Text(tokens[end - size : end], learnt[end - size : end]) for size, end in zip(lengths, ends, strict=True)]


@dataclass(frozen=True)
class Rows:
    """Texts side by side, on the host."""

    tokens: Tensor  # [N, S] int32
    documents: Tensor  # [N, S] int16, -1: empty
    places: Tensor  # [N, S] int32 index of each token in its document
    learnt: Tensor  # [N, S] bool

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_tokens(self) -> int:
        return int((self.documents >= 0).sum())

    @property
    def num_learnt(self) -> int:
        return int(self.learnt.sum())

    @property
    def most_documents(self) -> int:
        return int(self.documents.max()) + 1

    def take(self, index: Tensor) -> Rows:
        return Rows(*(values[index] for values in (self.tokens, self.documents, self.places, self.learnt)))

    def to(self, device: torch.device) -> Rows:
        """Without waiting for the device."""
        parts = (self.tokens, self.documents, self.places, self.learnt)
        if device.type == "cuda":
            parts = tuple(each.pin_memory() for each in parts)  # type: ignore[assignment]
        tokens, documents, places, learnt = (each.to(device, non_blocking=True) for each in parts)
        return Rows(tokens.long(), documents.long(), places.long(), learnt)


def pack(texts: Sequence[Text], row_len: int) -> Rows:
    """The longest first, each into the fullest row that has room for it; what is longer than a row is cut."""
    cut = [text.cut(row_len) for text in texts]
    order = sorted(range(len(cut)), key=lambda number: -len(cut[number].tokens))
    members: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(row_len + 1)]  # rows with so much room
    for number in order:
        size = len(cut[number].tokens)
        room = next((room for room in range(size, row_len + 1) if by_room[room]), None)
        if room is None:
            members.append([])
            row, room = len(members) - 1, row_len
        else:
            row = by_room[room].pop()
        members[row].append(number)
        by_room[room - size].append(row)
    return fill([[cut[number] for number in row] for row in members], row_len)


def fill(rows: Sequence[Sequence[Text]], row_len: int) -> Rows:
    shape = (len(rows), row_len)
    tokens, places = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.int32)
    documents, learnt = np.full(shape, -1, dtype=np.int16), np.zeros(shape, dtype=bool)
    for number, row in enumerate(rows):
        begin = 0
        for document, text in enumerate(row):
            size = len(text.tokens)
            span = slice(begin, begin + size)
            tokens[number, span], learnt[number, span] = text.tokens, text.learnt
            documents[number, span], places[number, span] = document, np.arange(size)
            begin += size
    return Rows(*(torch.from_numpy(each) for each in (tokens, documents, places, learnt)))


def usable(texts: Sequence[Text], row_len: int) -> list[Text]:
    """Those with something to learn in what fits into a row: a draft needs two tokens before the one it says."""
    kept = [text for text in texts if text.cut(row_len).learnt[1:].any()]
    if not kept:
        raise ValueError(
            f"of {len(texts)} texts none is left that holds a token of the target's within {row_len} tokens: raise "
            "--row-len, or give shorter prompts"
        )
    return kept


def frequent(texts: Sequence[Text], size: int | None, vocab_size: int) -> Tensor | None:
    """The `size` tokens that the target says most often, ascending: what a drafter shall be able to say. None: all."""
    if size is None or size >= vocab_size:
        return None
    counts = _counts(texts, vocab_size)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]))


def coverage(texts: Sequence[Text], ids: Tensor | None) -> float:
    """The share of what the target says that is among these tokens."""
    if ids is None:
        return 1.0
    counts = _counts(texts, int(ids.max()) + 1)
    return float(counts[ids.numpy()].sum() / max(counts.sum(), 1))


def counted(texts: Sequence[Text], vocab_size: int) -> np.ndarray:
    """How often each token occurs, whoever said it."""
    return np.bincount(np.concatenate([text.tokens for text in texts]), minlength=vocab_size)


def _counts(texts: Sequence[Text], vocab_size: int) -> np.ndarray:
    said = np.concatenate([text.tokens[1:][text.learnt[:-1]] for text in texts])
    return np.bincount(said, minlength=vocab_size)
