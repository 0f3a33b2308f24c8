"""Of a prompt nobody reads what the last layer makes of its rows, but for the last row: of the others its keys and
values are all that is wanted. So the MLP of that layer has only those rows that are read."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from outrider.kernels.take import take_rows
from outrider.types import Batch

WANTED_ROWS = "rows that are read of the next layer"  # in a pass's memo


def narrow(batch: Batch, rows: Tensor | None) -> None:
    """The next layer may leave out all other rows after its attention, where it can. None: all are read."""
    if rows is not None:
        batch.memo[WANTED_ROWS] = rows


def narrowed(x: Tensor, batch: Batch) -> Tensor:
    """x [T, ...] -> its wanted rows, unless they have been taken already, or all are read."""
    rows = batch.memo.pop(WANTED_ROWS, None)
    return x if rows is None else take_rows(x, rows)


@contextmanager
def all_rows(batch: Batch) -> Iterator[None]:
    """Meanwhile nothing is left out: for a layer that adds something to all rows of what another one makes."""
    rows = batch.memo.pop(WANTED_ROWS, None)
    yield
    narrow(batch, rows)


def run_narrowing(
    layers: Iterable[Callable[[Tensor, Batch], Tensor]], x: Tensor, batch: Batch, rows: Tensor | None
) -> Tensor:
    """x [T, H] through all layers, of which these rows are read; None: all."""
    *others, last = layers
    for layer in others:
        x = layer(x, batch)
    narrow(batch, rows)
    return narrowed(last(x, batch), batch)
