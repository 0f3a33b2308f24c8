"""What a drafter learns from: texts side by side, with what the target computed of them, and attention over them.
A drafter's own network runs over a lesson's rows as it runs over those of a round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.branches import KeysAndValues, branch_attention, trunk_attention
from outrider.kernels.head_loss import Divergence, HeadLoss, HeadMatrix, head_loss
from outrider.kernels.sampling import uniform
from outrider.layers.embedding import Head
from outrider.models.base import Target
from outrider.types import Batch

KEPT_SHARE, LEAST_SHARE = 0.7, 0.2  # of the places that learn one token further ahead


def num_kept(length: int, ahead: int) -> int:
    """Of so many places, those from which drafts are learnt that far ahead: fewer, as fewer drafts come so far."""
    return max(round(length * max(KEPT_SHARE**ahead, LEAST_SHARE)), 1)


@dataclass(frozen=True)
class Noise:
    """Random numbers of a step that depend on which of its rows one is, and not on who else is in the same lesson."""

    seeds: Tensor  # [R] a row's own, of this step alone

    def uniform(self, size: int) -> Tensor:
        """[R, size] from 0 to 1."""
        columns = torch.arange(size, device=self.seeds.device)
        return uniform(self.seeds, torch.zeros_like(self.seeds), columns)


@dataclass(frozen=True)
class Lesson:
    """R rows of S tokens. Documents within a row know nothing of each other; after the last one the row is empty."""

    tokens: Tensor  # [R, S]
    documents: Tensor  # [R, S] a number for each document of a row, -1: empty
    places: Tensor  # [R, S] index of each token in its document
    learnt: Tensor  # [R, S] bool: the token after this one is the target's own choice
    taps: Tensor  # [R, S, n, H] the target's, as the drafter wants them
    last: Tensor  # [R, S, H] the target's residual stream after its last layer
    depth: int  # draft tokens to learn
    divergence: Divergence
    noise: Noise
    head: Tensor  # [V, H] the target's, in the precision that products with heads are computed in
    most_learnt: int | None = None  # no more places than that are learnt; None: they are counted, which waits for them

    @property
    def shape(self) -> tuple[int, int]:
        return self.tokens.shape[0], self.tokens.shape[1]

    def ahead(self, values: Tensor, count: int) -> Tensor:
        """[R, S, ...]: of each column what stands `count` columns after it; at the end of a row, its last."""
        return values[:, self.columns(count)]

    def columns(self, count: int) -> Tensor:
        length = self.tokens.shape[1]
        return (torch.arange(length, device=self.tokens.device) + count).clamp(max=length - 1)

    def reaches(self, count: int) -> Tensor:
        """[R, S]: whether the column `count` places on is there, in the same document."""
        inside = torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.tokens.shape[1] - count
        return inside & (self.ahead(self.documents, count) == self.documents) & (self.documents >= 0)

    def order(self) -> Tensor:
        """[R, S] columns in random order; first those after whose next token the target goes on itself."""
        useful = self.ahead(self.learnt, 1) & self.reaches(2)
        return (self.noise.uniform(self.tokens.shape[1]) + useful).argsort(dim=1, descending=True)


@dataclass(frozen=True)
class Loss:
    """Of a lesson. Sums, so that those of several lessons can be added before they are divided."""

    total: Tensor  # with gradients, weighted
    weight: Tensor  # what it is to be divided by
    agreed: Tensor  # [K] how often the drafter's best token was the target's, by place in the draft
    asked: Tensor  # [K] out of how many


def joined(losses: Sequence[Loss]) -> Loss:
    """Of guesses that were judged by themselves, one place of a draft after the other."""
    total, weight = (torch.stack([getattr(each, name) for each in losses]).sum() for name in ("total", "weight"))
    agreed, asked = (torch.cat([getattr(each, name) for each in losses]) for name in ("agreed", "asked"))
    return Loss(total, weight, agreed, asked)


@dataclass(frozen=True)
class Teaching:
    """Both heads, over the tokens that the drafter knows."""

    head: HeadMatrix
    teacher: HeadMatrix
    known: Tensor | None  # [V_target] bool; None: all are

    def knows(self, tokens: Tensor) -> Tensor:
        return torch.ones_like(tokens, dtype=torch.bool) if self.known is None else self.known[tokens]


def teaching(lesson: Lesson, target: Target, head: Head | None, ids: Tensor | None) -> Teaching:
    """`head`: the drafter's own, or None. `ids`: the target's ids of the drafter's tokens, None: the same."""
    matrix = lesson.head
    teacher = HeadMatrix(matrix if ids is None else matrix[ids], target.head.softcap)
    own = teacher if head is None else HeadMatrix(head.weight.to(matrix.dtype), head.softcap)
    known = None
    if ids is not None:
        known = torch.zeros(target.vocab_size, dtype=torch.bool, device=ids.device).index_fill(0, ids, True)
    return Teaching(own, teacher, known)


def compare(lesson: Lesson, target: Target, taught: Teaching, hidden: Tensor, states: Tensor) -> HeadLoss:
    """hidden [N, H] of the drafter against the target's states [N, H_t] before its final norm."""
    with torch.no_grad():
        normed = target.norm(states)
    return head_loss(hidden, taught.head, normed, taught.teacher, lesson.divergence)


@dataclass(frozen=True)
class Guess:
    """What the head reads at some places, and what was to be said there."""

    hidden: Tensor  # [R, A, H]
    anchors: Tensor  # [R, A] columns of the newest token that was known
    ahead: int  # how many places after the token that follows it; 0: that one itself
    whole: Tensor | None = None  # [R, A] bool: what led to it is of one document; None: always

    @property
    def columns(self) -> Tensor:
        """[R, A] of the target's rows that say the same token."""
        return self.anchors + self.ahead


def judged(
    lesson: Lesson,
    target: Target,
    taught: Teaching,
    guesses: Sequence[Guess],
    weigh: Weigh | None = None,
    chances: Sequence[Tensor] | None = None,
) -> Loss:
    """The loss of guesses, each with K = its number in the sequence. `weigh`: from surprise [R, A, K] and what was
    asked for to weights; guesses then have the same anchors. `chances`: of each guess [R, A], as logits, how likely it
    is thought to be right, which is learnt too."""
    length = lesson.tokens.shape[1]
    first = torch.arange(len(lesson.tokens), device=lesson.tokens.device)[:, None] * length
    follows = lesson.ahead(lesson.tokens, 1)
    states, asked = [], []
    for guess in guesses:
        column = guess.columns.clamp(max=length - 2)
        same = lesson.documents.gather(1, column + 1) == lesson.documents.gather(1, guess.anchors)
        here = same & (guess.columns < length - 1) & (lesson.documents.gather(1, guess.anchors) >= 0)
        here = here if guess.whole is None else here & guess.whole
        asked.append(here & lesson.learnt.gather(1, column) & taught.knows(follows.gather(1, column)))
        states.append(lesson.last.flatten(0, 1)[(first + column).flatten()])
    counted = torch.cat([each.flatten() for each in asked])
    sizes = [each.numel() for each in asked]
    most = None if lesson.most_learnt is None else sum(min(size, lesson.most_learnt) for size in sizes)
    index = places(counted, most)  # the vocabulary is most of the work: rows that nobody asks for are left out
    every = torch.arange(len(index), device=index.device)
    rows = torch.where(index < len(counted), index, every)  # gradients of one row that all share would be added in turn
    hidden = torch.cat([guess.hidden.flatten(0, 1) for guess in guesses])[rows]
    found = compare(lesson, target, taught, hidden, torch.cat(states)[rows])
    weights = counted.float()
    if weigh is not None:
        surprise = _spread(found.surprise, index, len(counted))
        parts = [part.view(asked[0].shape) for part in surprise.split(sizes)]
        weights = torch.cat(
            [each.flatten() for each in weigh(torch.stack(parts, -1), torch.stack(asked, -1)).unbind(-1)]
        )
    agreed = _spread(found.agreed, index, len(counted))
    total = (found.loss * F.pad(weights, (0, 1))[index]).sum()
    if chances is not None:
        thought, right = torch.cat([each.flatten() for each in chances])[rows].float(), found.agreed.float()
        doubt = F.binary_cross_entropy_with_logits(thought, right, reduction="none")
        total = total + (doubt * F.pad(counted.float(), (0, 1))[index]).sum()
    sums = [torch.stack([part.sum().float() for part in each.split(sizes)]) for each in (agreed, counted)]
    return Loss(total, weights.sum(), *sums)


def places(wanted: Tensor, most: int | None) -> Tensor:
    """Where `wanted` [N] is true. `most`: as many are there at most; then the device need not be waited for, and so
    many are returned, the rest of them N."""
    if most is None:
        return wanted.nonzero()[:, 0]
    order = torch.where(wanted, wanted.cumsum(0) - 1, most)
    every = torch.arange(len(wanted), device=wanted.device)
    return torch.full((most + 1,), len(wanted), device=wanted.device).scatter_(0, order, every)[:most]


def _spread(values: Tensor, index: Tensor, size: int) -> Tensor:
    """To where they came from [size]; what has index `size` came from nowhere."""
    return values.new_zeros(size + 1).index_copy(0, index, values)[:size]


Weigh = Callable[[Tensor, Tensor], Tensor]


def by_survival(surprise: Tensor, asked: Tensor) -> Tensor:
    """D-PACE: a guess [..., K] weighs as much as the draft is likely to come to it and beyond, as things stand: half of
    the drafter's own confidence, half of trust."""
    chance = torch.where(asked, 0.5 * torch.exp(-surprise) + 0.5, 1.0).cumprod(-1) * asked
    return chance.flip(-1).cumsum(-1).flip(-1) * asked


# ---- attention ----


@dataclass(frozen=True)
class Grown:
    """A part of the rows of a pass that hang on columns of the trunk: B rows on each of A anchors of every row."""

    anchors: Tensor  # [R, A] columns of the trunk
    count: int = 1  # B
    before: int = 0  # 1: an anchor's own column is not seen, only those before it
    depth: int = 0  # how far ahead of its anchor a row is, for a window


class Branches:
    """Attention over a lesson: keys and values of every layer, first of its texts (the trunk), then of what grows from
    them. A branch sees its document up to its anchor, and itself."""

    def __init__(self, lesson: Lesson, window: int = 0) -> None:
        self._documents, self._window = lesson.documents, window
        self._trunk: dict[object, KeysAndValues] = {}
        self._own: dict[object, list[KeysAndValues]] = {}
        self._parts: Sequence[Grown | None] = (None,)  # None: the trunk itself
        self._seen: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}  # with its anchors, so that they stay
        columns = torch.arange(self._documents.shape[1], device=self._documents.device)
        self.columns = columns.expand(self._documents.shape)

    def of(self, *parts: Grown | None) -> Branches:
        """The same, for a pass over these parts, one after the other."""
        self._parts = parts
        return self

    def remember(self, layer: object, k: Tensor, v: Tensor) -> None:
        self._trunk[layer] = (self._in_rows(k), self._in_rows(v))

    def attend(self, layer: object, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        num_rows, length = self._documents.shape
        sizes = [num_rows * (length if part is None else part.anchors.shape[1] * part.count) for part in self._parts]
        found = []
        for part, *rows in zip(self._parts, *(x.split(sizes) for x in (q, k, v)), strict=True):
            found.append(self._attend(layer, part, (rows[0], rows[1], rows[2]), scale))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _attend(self, layer: object, part: Grown | None, rows: tuple[Tensor, Tensor, Tensor], scale: float) -> Tensor:
        q, k, v = rows
        if part is None:
            self.remember(layer, k, v)
            seen = self.seen(Grown(self.columns))
            return trunk_attention(self._in_rows(q), self._trunk[layer], seen, scale).flatten(0, 1)
        num_rows, num_branches = part.anchors.shape
        size = (num_rows, num_branches, part.count)
        own = self._own.setdefault(layer, [])
        own.append((k.unflatten(0, size), v.unflatten(0, size)))
        keys, values = (torch.cat([x[:, :num_branches] for x in each], dim=2) for each in zip(*own, strict=True))
        found = branch_attention(q.unflatten(0, size), self._trunk[layer], (keys, values), self.seen(part), scale)
        return found.flatten(0, 2)

    def seen(self, part: Grown) -> Tensor:
        """[R, A, S] what of the trunk each branch sees."""
        depth = part.depth if self._window else 0
        key = (part.anchors.data_ptr(), part.anchors.shape, part.before, depth)
        if key not in self._seen:
            column = torch.arange(self._documents.shape[1], device=part.anchors.device)
            anchor = part.anchors[..., None]
            seen = column <= anchor - part.before
            seen = seen & (self._documents[:, None, :] == self._documents.gather(1, part.anchors)[..., None])
            if self._window:
                seen = seen & (column > anchor + depth - self._window)
            self._seen[key] = (seen, part.anchors)
        return self._seen[key][0]

    def _in_rows(self, x: Tensor) -> Tensor:
        return x.unflatten(0, self._documents.shape)


def rows_of(tokens: Tensor, positions: Tensor, attending: Branches) -> Batch:
    """Rows [N] of a lesson as a network takes them."""
    tokens, positions = tokens.flatten(), positions.flatten()
    nothing = tokens.new_zeros(1)
    return Batch(
        input_ids=tokens,
        positions=positions,
        indices=positions,
        query_start=nothing,
        request=nothing,
        row_slots=nothing,
        slots=nothing,
        page_table=nothing[None],
        write_locations=nothing,
        page_size=1,
        max_len=1,
        max_rows=1,
        attending=attending,
    )


Run = Callable[[Batch, Tensor], tuple[Tensor, Tensor]]  # rows and their states -> what the head reads, what is fed back


def unrolled(lesson: Lesson, window: int, state: Tensor, run: Run) -> list[Guess]:
    """A network drafts from every place of the text at once, each step from its own output of the step before, beside
    the text's tokens; the further ahead, from the fewer places. `state` [R S, H]: what it reads at first."""
    branches, length = Branches(lesson, window), lesson.shape[1]
    order, anchors, part, found = lesson.order(), branches.columns, None, []
    for ahead in range(lesson.depth):
        if ahead:
            states, anchors = state.unflatten(0, anchors.shape), order[:, : num_kept(length, ahead)]
            states = taken(states, anchors) if ahead == 1 else states[:, : anchors.shape[1]]
            state, part = states.flatten(0, 1), Grown(anchors, depth=ahead)
        tokens = lesson.tokens.gather(1, (anchors + 1 + ahead).clamp(max=length - 1))
        places = lesson.places.gather(1, anchors) + ahead
        read, state = run(rows_of(tokens, places, branches.of(part)), state)
        newest, whole = (anchors + 1).clamp(max=length - 1), lesson.reaches(1).gather(1, anchors)
        found.append(Guess(read.unflatten(0, anchors.shape), newest, ahead, whole))
    return found


def taken(values: Tensor, columns: Tensor) -> Tensor:
    """values [R, S, H] at columns [R, A] -> [R, A, H]."""
    return values.gather(1, columns[..., None].expand(-1, -1, values.shape[2]))
