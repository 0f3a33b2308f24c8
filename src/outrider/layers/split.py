"""Which part of a layer a rank has. A layer that is made inside `split_over` says by its sizes how it is split: a
`Share` of outputs, or of inputs, instead of a number. Loading reads what the share names, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import nn

from outrider.kernels.collective import Ranks

UNIT = 16  # widths are split into multiples of it, where that is possible

_ranks: ContextVar[Ranks | None] = ContextVar("ranks", default=None)


@contextmanager
def split_over(ranks: Ranks | None) -> Iterator[None]:
    """Layers made inside are split over these ranks; None: they are whole."""
    token = _ranks.set(ranks)
    try:
        yield
    finally:
        _ranks.reset(token)


def current_ranks() -> Ranks | None:
    """The ranks that layers made now are split over."""
    return _ranks.get()


@dataclass(frozen=True)
class Share:
    """What a rank has of a dimension: ranges of the whole, one after the other. A range may come twice."""

    whole: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        return sum(end - begin for begin, end in self.ranges)

    @property
    def is_whole(self) -> bool:
        return self.ranges == ((0, self.whole),)

    def __mul__(self, count: int) -> Share:
        """The cut of a dimension whose every entry stands for so many."""
        return Share(self.whole * count, tuple((begin * count, end * count) for begin, end in self.ranges))

    def __add__(self, other: Share) -> Share:
        """Two dimensions, one behind the other."""
        moved = tuple((begin + self.whole, end + self.whole) for begin, end in other.ranges)
        joined = (*self.ranges, *moved)
        whole = self.is_whole and other.is_whole
        return Share(self.whole + other.whole, ((0, self.whole + other.whole),) if whole else joined)


def whole(count: int) -> Share:
    """All of a dimension, on every rank."""
    return Share(count, ((0, count),))


def equal_share(count: int, what: str) -> Share:
    """Of things that cannot be cut, and of which every rank has as many: heads, groups."""
    ranks = current_ranks()
    if ranks is None:
        return whole(count)
    if count % ranks.size:
        raise ValueError(
            f"config.json: {what} = {count} cannot be split over {ranks.size} ranks (tensor_parallel_size): choose a "
            "number that divides it"
        )
    each = count // ranks.size
    return Share(count, ((ranks.rank * each, (ranks.rank + 1) * each),))


def width_share(count: int, what: str) -> Share:
    """A rank's share of a width that may be cut anywhere: about as much for every rank."""
    ranks = current_ranks()
    if ranks is None:
        return whole(count)
    rank, size = ranks.rank, ranks.size
    if count < size:
        raise ValueError(f"config.json: {what} = {count} cannot be split over {size} ranks (tensor_parallel_size)")
    unit = UNIT if count % UNIT == 0 and count // UNIT >= size else 1
    num_units = count // unit
    return Share(count, ((rank * num_units // size * unit, (rank + 1) * num_units // size * unit),))


def key_share(num_heads: int, num_kv_heads: int) -> Share:
    """The key/value heads that a rank's query heads look at, so that these are shared out among them evenly: its part
    of them; the one that all look at; or else, one for each query head."""
    ranks = current_ranks()
    if ranks is None:
        return whole(num_kv_heads)
    if num_kv_heads % ranks.size == 0:
        return equal_share(num_kv_heads, "num_key_value_heads")
    ((begin, end),) = equal_share(num_heads, "num_attention_heads").ranges
    group = num_heads // num_kv_heads
    seen = [head // group for head in range(begin, end)]
    if len(set(seen)) == 1:
        seen = seen[:1]
    return Share(num_kv_heads, tuple((head, head + 1) for head in seen))


def vocabulary_share(count: int) -> tuple[Share, int]:
    """The ids that a rank has; and how many rows they take, the same number on all ranks: the last ones are padding."""
    ranks = current_ranks()
    if ranks is None:
        return whole(count), count
    each = -(-count // ranks.size)
    begin = min(ranks.rank * each, count)
    return Share(count, ((begin, min(begin + each, count)),)), each


# what a parameter holds of a whole tensor


@dataclass(frozen=True)
class Cut:
    dim: int
    share: Share
    is_absent: bool = False  # another rank has it, once for all: here it is nought


def cut(parameter: nn.Parameter, dim: int, share: Share, *, is_absent: bool = False) -> None:
    """Says that a parameter holds this share of a tensor's dimension. What it has room for beyond that is nought."""
    if not share.is_whole or is_absent:
        parameter.cut = Cut(dim, share, is_absent)  # type: ignore[attr-defined]


def cut_of(parameter: nn.Parameter) -> Cut | None:
    return getattr(parameter, "cut", None)


def whole_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """The shape of what a parameter is a part of; its own, where it is no part."""
    found, shape = cut_of(parameter), list(parameter.shape)
    if found is not None:
        shape[found.dim] = found.share.whole
    return tuple(shape)
