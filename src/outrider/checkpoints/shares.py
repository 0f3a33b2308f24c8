"""Filling a parameter that holds a part of a checkpoint's tensors: only what lies in its share is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor, nn

from outrider.checkpoints.finite import check_kind
from outrider.layers.split import Cut
from outrider.types import Checkpoint, Weight


def fill_share(
    parameter: nn.Parameter, cut: Cut, checkpoint: Checkpoint, weight: Weight, combined: Callable[[], Tensor]
) -> None:
    """Where tensors are more than joined, all of them are read and made one first, by `combined`."""
    if cut.is_absent:
        parameter.zero_()
        return
    if weight.combine is not None:
        whole = combined()
        pieces = [whole.narrow(cut.dim, begin, end - begin) for begin, end in cut.share.ranges]
        _put(parameter, cut.dim, pieces)
    elif cut.dim == 0:
        _put(parameter, 0, _rows(parameter, cut, checkpoint, weight))
    else:
        num_rows = [checkpoint.shape(name)[0] for name in weight.names]
        for name, part in zip(weight.names, parameter.split(num_rows), strict=True):
            pieces = [_read(parameter, checkpoint, name, cut.dim, *each) for each in cut.share.ranges]
            _put(part, cut.dim, pieces)


def _put(place: Tensor, dim: int, pieces: Iterable[Tensor]) -> None:
    """Puts tensors into a parameter one behind the other; what is left is padding."""
    done = 0
    for piece in pieces:
        place.narrow(dim, done, piece.shape[dim]).copy_(piece)
        done += piece.shape[dim]
    place.narrow(dim, done, place.shape[dim] - done).zero_()


def _rows(parameter: nn.Parameter, cut: Cut, checkpoint: Checkpoint, weight: Weight) -> Iterator[Tensor]:
    """Rows of tensors that are joined one below the other."""
    for begin, end in cut.share.ranges:
        first = 0
        for name in weight.names:
            count = checkpoint.shape(name)[0]
            low, high = max(begin - first, 0), min(end - first, count)
            if low < high:
                yield _read(parameter, checkpoint, name, 0, low, high)
            first += count


def _read(parameter: nn.Parameter, checkpoint: Checkpoint, name: str, dim: int, begin: int, end: int) -> Tensor:
    part = getattr(checkpoint, "part", None)
    if part is None:  # quantised in blocks that may reach across the borders
        found = checkpoint.tensor(name).narrow(dim, begin, end - begin)
    else:
        found = part(name, dim, begin, end)
    check_kind(checkpoint, name, found, parameter)
    return found
