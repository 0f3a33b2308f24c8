"""The handful of types that carry everything between the parts of the engine.
T rows, B requests, K draft tokens, J = K + 1 judged rows, H hidden size, V vocabulary, S slots, P pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

ATTENTION_WORK = "attention work"  # what names in Batch.memo begin with that say how attention's work is shared out
STREAM_IS_FREE = "stream is free"  # in Batch.memo: nobody needs the residual stream as it was before this layer
NULL_PAGE = 0  # a page nobody owns: rows that must not be remembered are written there


class Checkpoint(Protocol):
    """Weights on disk, whatever the format: a config, and tensors by name."""

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]

    def names(self) -> list[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def tensor(self, name: str) -> Tensor: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Paged:
    """Keys and values of every token, in pages; `window` > 0 says how many of them a row looks back on."""

    num_heads: int
    head_dim: int
    value_dim: int
    window: int = 0

    def bytes_per_token(self, itemsize: int) -> int:
        return self.num_heads * (self.head_dim + self.value_dim) * itemsize


@dataclass(frozen=True)
class Latent:
    """One vector for every token, in pages: all heads' key, and in its first `value_dim` places their value too."""

    dim: int
    value_dim: int

    def bytes_per_token(self, itemsize: int) -> int:
        return self.dim * itemsize


@dataclass(frozen=True)
class Recurrent:
    """States of fixed size, float32, that every token changes for good. There is no going back in them, so the
    states after each row that may turn out to be the last are kept, side by side, until the verdict."""

    shapes: tuple[tuple[int, ...], ...]

    @property
    def bytes_per_state(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes) * 4


CacheSpec = Paged | Latent


class Attending(Protocol):
    """Attention without pages, while a drafter is trained: it keeps keys and values itself, with their gradients."""

    def attend(self, layer: object, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor: ...  # q's shape
    def remember(self, layer: object, k: Tensor, v: Tensor) -> None: ...


@dataclass(frozen=True)
class Weight:
    """Where a parameter comes from: tensors of the checkpoint, and how they become one."""

    names: tuple[str, ...]
    combine: Callable[[list[Tensor]], Tensor] | None = None  # None: one below the other
    # The same of matrices in few bits (kernels.quantised.Quantised); None: they become dense first, unless one is below
    # the other
    combine_quantised: Callable[[list[Any]], Any] | None = None


@dataclass
class SlotState:
    """What the device remembers of each running request, by slot."""

    tokens: Tensor  # [S, W] committed tokens, then the draft; the last column is a dump for masked writes
    lengths: Tensor  # [S] number of committed tokens
    computed: Tensor  # [S] number of tokens whose keys and values are in the cache
    followed: Tensor  # [S] how many of them the drafter has seen
    draft_count: Tensor  # [S] draft tokens that follow the committed ones
    kept_state: Tensor  # [S] which of the recurrent states kept in the last round is the true one
    wanted: Tensor | None = None  # [2, W, S] snapshots of recurrent states: after how many tokens, and in which place
    positions: Tensor | None = None  # [S, 3, W] rotary positions where they are not the index: time, height, width
    last_key: Tensor | None = None  # [S, W] the last index a row sees, where that may be after it: within images
    feature_rows: Tensor | None = None  # [S, W] which of the features stands for a token, -1: none
    features: Tensor | None = None  # [F, L, H] of the images of all running requests
    recurrent: bool = False  # some layers have states that every token changes

    @property
    def null_slot(self) -> int:
        """The last one, which belongs to no request: rows without one are said to be its."""
        return len(self.lengths) - 1

    def positions_at(self, slots: Tensor, indices: Tensor) -> Tensor:
        """Rotary positions of cache indices [..., T]: the same, or [..., 3, T]."""
        if self.positions is None:
            return indices
        return self.positions[slots, :, indices.clamp(min=0)].movedim(-1, -2)

    def features_at(self, slots: Tensor, indices: Tensor) -> Features | None:
        if self.feature_rows is None or self.features is None:
            return None
        return Features(self.feature_rows[slots, indices], self.features)


@dataclass(frozen=True)
class Images:
    """The images of one prompt, as the target takes them in."""

    indices: Tensor  # [N] which tokens of the prompt they stand for
    features: Tensor  # [N, L, H] what is embedded there, then what is added after the first layers, if anything
    spans: tuple[tuple[int, int], ...]  # begin and end of each image in the prompt
    names: tuple[int, ...]  # [N] numbers that tell these tokens from those of another image
    positions: Tensor | None = None  # [3, n] rotary positions of the whole prompt, where they are not the index


@dataclass(eq=False)
class Prediction:
    """What a request expects its answer to be. Whoever drafts from it notes here how far the answer has followed it."""

    tokens: np.ndarray  # int64; answers to the same prompt share it
    begin: int  # index of the answer's first token
    place: int = 0  # where the answer goes on in it, as far as is known
    num_seen: int = 0  # tokens of the answer that were compared
    num_agreed: int = 0  # last tokens of the answer that agree with those before the place; 0: it is lost


@dataclass(frozen=True)
class Features:
    """Which rows of a batch are images, and what stands in their place."""

    rows: Tensor  # [T] which of the values, -1: the row is text
    values: Tensor  # [F, L, H]

    def at(self, level: int) -> tuple[Tensor, Tensor]:
        """Whether each row is an image's [T, 1], and its values of a level [T, H]."""
        return (self.rows >= 0)[:, None], self.values[self.rows.clamp(min=0), level]


@dataclass(frozen=True)
class Recurrence:
    """What recurrent layers need to know of a pass: where each request goes on from, and what must be kept."""

    read: Tensor  # [B] which of the kept states
    rows: Tensor  # [B, E] rows of the pass whose state is kept, in places first, first + 1, ...
    first: int = 0
    wanted: Tensor | None = None  # see SlotState: snapshots are taken where the pass comes by


@dataclass(frozen=True)
class Sampling:
    """The sampling options of all running requests, by slot. The flags are about the requests of one round: the host
    knows them when it plans the round."""

    temperature: Tensor  # [S]
    top_k: Tensor  # [S], V where off
    top_p: Tensor  # [S]
    min_p: Tensor  # [S]
    seed: Tensor  # [S] int64
    repetition: Tensor  # [S]
    presence: Tensor  # [S]
    frequency: Tensor  # [S]
    prompt_len: Tensor  # [S]
    min_len: Tensor  # [S] sequence length under which no end token may be chosen
    end_ids: Tensor  # [S, E] ids banned while too short, padded with -1
    bias: Tensor | None  # [S, V] logit bias, -inf where a token is not allowed; None: nobody has one
    bad_words: Tensor | None  # [S, W, M] id sequences aligned right, padded with -1; None: nobody has any
    greedy: bool  # every request is greedy
    filtered: bool  # some request has top_k, top_p, min_p or a filter of somebody's own
    penalised: bool  # some request has a penalty
    bounded: bool  # some request has min_tokens
    extra: Mapping[str, Tensor] = field(default_factory=dict)  # [S] for each filter of kernels/filters.py

    @property
    def needs_adjusting(self) -> bool:
        """Whether some request's logits are changed before a token is chosen."""
        return self.bias is not None or self.bad_words is not None or self.penalised or self.bounded


@dataclass
class Batch:
    """Device view of one forward pass: rows of several requests, one after the other."""

    input_ids: Tensor  # [T]
    positions: Tensor  # [T] rotary positions, or [3, T]
    indices: Tensor  # [T] cache index of each row; a row sees the keys up to its own index
    query_start: Tensor  # [B + 1] int32, first row of each request
    request: Tensor  # [T] which request of the batch a row belongs to
    row_slots: Tensor  # [T] the slot of that request; the null slot for rows that only fill up a fixed size
    slots: Tensor  # [B]
    page_table: Tensor  # [B, M] int32
    write_locations: Tensor  # [T] page * page_size + offset
    page_size: int
    max_len: int  # no index of this batch reaches it
    max_rows: int  # the most rows any request has
    first_key: int = 0  # the first cache index that holds anything
    recurrence: Recurrence | None = None
    features: Features | None = None  # where some rows are images
    last_key: Tensor | None = None  # [T] the last index a row sees, for layers that look both ways within an image
    memo: dict[Any, Any] = field(default_factory=dict)  # what layers share within the pass, e.g. rotary tables
    attending: Attending | None = None  # in training: what attention goes by instead of pages


@dataclass(frozen=True)
class ReadRows:
    """Rows of a batch whose last state somebody reads: the last ones of some requests, one request after the other."""

    rows: Tensor  # [L]
    start: Tensor | None = None  # [B + 1] int32, where those of each request begin: where that is known
    most: int = 0  # of one request, where that is known


@dataclass(frozen=True)
class RoundShape:
    """The sizes of a round, known to the host before it begins. What a round holds may be less: the rest is padding."""

    num_seats: int  # B
    num_rows: int  # T
    num_judged: int  # L, rows whose logits are wanted
    max_drafts: int  # J - 1, judged drafts of a request
    depth: int  # tokens to draft for the next round
    max_rows: int  # of one request
    max_len: int  # no cache index reaches it
    rests: bool = False  # the drafter is left out
    misses: bool = True  # it will see later what it misses meanwhile
    judges_all: bool = False  # everybody decodes: every row is judged, in the order of the rows


@dataclass(frozen=True)
class Seats:
    """Who takes part in a round, as the host planned it. Empty seats hold the null slot and nothing else."""

    slots: Tensor  # [B]
    pending: Tensor  # [B] tokens to run that are known: a part of the prompt, or the newest token; 0: an empty seat
    allowed: Tensor  # [B] draft tokens to judge behind them, at most
    emits: Tensor  # [B] 1 where they reach the last known token, so that a new one comes out

    @classmethod
    def of(cls, table: Tensor) -> Seats:
        """table [4, B]: a row for each of the fields."""
        return cls(*table.unbind())


@dataclass(frozen=True)
class Guidance:
    """What grammars say about a round, by seat."""

    masks: Tensor  # [B, J] int32, after each judged row: which of `bits` says what is allowed, from 1; 0: anything
    num_forced: Tensor  # [B] int32
    forced: Tensor  # [B, F] int32, tokens that will come next because nothing else can; F = 2 J - 1
    bits: Tensor  # [G, ceil(V / 32)] int32, lowest bit first

    @classmethod
    def of(cls, head: Tensor, bits: Tensor) -> Guidance:
        """head [B, 3 J] int32: the other fields side by side."""
        judged = head.shape[1] // 3
        return cls(head[:, :judged], head[:, judged], head[:, judged + 1 :], bits)


@dataclass
class Step:
    """One round as planned: the batch, and what is judged in it."""

    batch: Batch
    shape: RoundShape
    starts: Tensor  # [B] cache index of each request's first row
    num_rows: Tensor  # [B]
    num_drafts: Tensor  # [B] how many of the rows, the last ones, hold drafts
    emits: Tensor  # [B] bool; false for a prompt chunk that is not the last, and for empty seats
    judged: Tensor  # [L] rows whose logits are wanted: of each request that emits its last known token, then its drafts
    judged_slots: Tensor  # [L] whose each of them is, where a token will be chosen after it
    judged_next: Tensor  # [L] the index where that token will stand
    judged_start: Tensor  # [B + 1] int32, where the judged rows of each request begin
    sampling: Sampling
    state: SlotState
    number: int = 0  # of the round, where other ranks are told of it
    tenants: tuple[str | None, ...] = ()  # [B] whose requests they are; what one tenant says, no other may be shown
    predictions: tuple[Prediction | None, ...] = ()  # [B] what each answer is expected to be
    guidance: Guidance | None = None  # None: nothing is forbidden, nothing forced

    @property
    def depth(self) -> int:
        """Draft tokens wanted for the next round; 0: none, but the drafter still follows the text."""
        return self.shape.depth


@dataclass
class Hidden:
    """What a target computed: the residual stream after the last layer, and the taps that were asked for."""

    last: Tensor  # [T, H] before the final norm, or those rows that were asked for
    taps: Tensor  # [T, n, H]
    carry: Tensor | None = None  # [B, C, n, H] taps of the rows before each request's first, the nearest last


@dataclass
class Draft:
    tokens: Tensor  # [B, K]
    count: Tensor  # [B]
    predicted: Tensor | None = None  # [B] bool, whether it is from the request's own prediction; None: none is
    forced: Tensor | None = None  # [B] bool, whether a grammar says what comes next; None: none does


@dataclass
class Verdict:
    tokens: Tensor  # [B, J] the target's own choices
    count: Tensor  # [B] how many of them are committed
    kept: Tensor  # [B] rows of the pass that stay in the cache


@dataclass(frozen=True)
class Outcome:
    """What a round brought one request, as the host reads it."""

    num_judged: int  # drafts that were judged
    tokens: list[int]  # committed
    kept: int  # rows that stay in the cache
    draft: list[int]  # for the next round
    predicted: bool = False  # the draft is from the request's own prediction
    forced: bool = False  # a grammar says what comes next


@dataclass(frozen=True)
class Resolved:
    """One setting of a drafter, and where it was read."""

    value: Any
    source: str
