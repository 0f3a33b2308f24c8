"""Of a prompt nobody reads what the last layer makes of its rows, but for the last row: of the others its keys and
values are all that is wanted. So the MLP of that layer, and its attention too where it can, has only those rows that
are read."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from outrider.kernels.take import take_rows
from outrider.types import NULL_PAGE, STREAM_IS_FREE, Batch, ReadRows

READ_ROWS = "rows that are read of the next layer"  # in a pass's memo


def narrow(batch: Batch, read: ReadRows | None) -> None:
    """The next layer may leave out all other rows, where it can. None: all are read."""
    if read is not None:
        batch.memo[READ_ROWS] = read


def narrowed(x: Tensor, batch: Batch) -> Tensor:
    """x [T, ...] -> the rows of it that are read, unless they have been taken already, or all are."""
    read = batch.memo.pop(READ_ROWS, None)
    return x if read is None else take_rows(x, read.rows)


def narrowed_batch(batch: Batch) -> tuple[Tensor, Batch] | None:
    """The rows [L] that are read, and a batch of them alone, whose keys are in their pages already; None where all are
    read, or nobody says whose each of them is."""
    read = batch.memo.get(READ_ROWS)
    if read is None or read.start is None:
        return None
    del batch.memo[READ_ROWS]
    rows = read.rows
    few = replace(
        batch,
        input_ids=batch.input_ids[rows],
        positions=batch.positions[..., rows],
        indices=batch.indices[rows],
        query_start=read.start,
        request=batch.request[rows],
        row_slots=batch.row_slots[rows],
        write_locations=torch.full_like(rows, NULL_PAGE * batch.page_size),
        max_rows=read.most,
        last_key=None if batch.last_key is None else batch.last_key[rows],
        memo={STREAM_IS_FREE: True},
    )
    return rows, few


@contextmanager
def all_rows(batch: Batch) -> Iterator[None]:
    """Meanwhile nothing is left out: for a layer that adds something to all rows of what another one makes."""
    read = batch.memo.pop(READ_ROWS, None)
    yield
    narrow(batch, read)


def run_narrowing(
    layers: Iterable[Callable[[Tensor, Batch], Tensor]], x: Tensor, batch: Batch, rows: Tensor | None
) -> Tensor:
    """x [T, H] through all layers, of which these rows are read; None: all."""
    *others, last = layers
    for layer in others:
        x = layer(x, batch)
    narrow(batch, None if rows is None else ReadRows(rows))
    return narrowed(last(x, batch), batch)
