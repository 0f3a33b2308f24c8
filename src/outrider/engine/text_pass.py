"""The target over rows of whole texts, as it serves them: every document is a request with pages of its own.
Its keys and values lie in memory for this alone, so that an engine which serves the same target is not disturbed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.upload import upload
from outrider.layers.cached import cached_layers, recurrent_layers
from outrider.models.base import Target
from outrider.types import NULL_PAGE, Batch, Hidden, Latent, Recurrence

PAGE_SIZE = 16


@dataclass(frozen=True)
class TextShape:
    """What is read in a pass, and what is wanted of it."""

    taps: tuple[int, ...]
    num_pages: int  # that any rows which are read at once take at most
    rows_at_once: int


class TextPass:
    def __init__(self, target: Target, shape: TextShape) -> None:
        self.target, self.shape = target, shape
        parameter = next(target.parameters())
        self.device, dtype = parameter.device, parameter.dtype
        size = (shape.num_pages + 1, PAGE_SIZE)
        self._layers = cached_layers(target)
        self._pages: list[tuple[Tensor, Tensor]] = []
        for layer in self._layers:
            spec = layer.spec
            if isinstance(spec, Latent):
                latent = torch.zeros(*size, 1, spec.dim, dtype=dtype, device=self.device)
                self._pages.append((latent, latent[..., : spec.value_dim]))
            else:
                dims = (spec.head_dim, spec.value_dim)
                keys, values = (torch.zeros(*size, spec.num_heads, d, dtype=dtype, device=self.device) for d in dims)
                self._pages.append((keys, values))

        # every document begins with nothing, and of what comes of it nothing is kept: one empty state is enough
        self._recurrent = recurrent_layers(target)
        self._states = [
            tuple(torch.zeros(1, 1, *shape, device=self.device) for shape in layer.spec.shapes)
            for layer in self._recurrent
        ]

    @torch.no_grad()
    def read(self, tokens: Tensor, documents: Tensor) -> Hidden:
        """tokens and their documents [R, S], on the host -> taps [R S, n, H] and last [R S, H]. What stands in empty
        places means nothing. A few rows at a time: they use the same pages, one after the other."""
        rows = zip(tokens.split(self.shape.rows_at_once), documents.split(self.shape.rows_at_once), strict=True)
        with self._lent():
            parts = [self.target(self._batch(*some), self.shape.taps) for some in rows]
        if len(parts) == 1:
            return parts[0]
        return Hidden(torch.cat([part.last for part in parts]), torch.cat([part.taps for part in parts]))

    @contextmanager
    def _lent(self) -> Iterator[None]:
        """The layers have this memory for a while, then again what they had."""
        before = [layer.pages for layer in self._layers]
        states = [(layer.states, layer.snapshots) for layer in self._recurrent]
        try:
            for recurrent, empty in zip(self._recurrent, self._states, strict=True):
                recurrent.states, recurrent.snapshots = empty, None
            for layer, pages in zip(self._layers, self._pages, strict=True):
                layer.pages = pages
            yield
        finally:
            for layer, own in zip(self._layers, before, strict=True):
                layer.pages = own
            for recurrent, (kept, snapshots) in zip(self._recurrent, states, strict=True):
                recurrent.states, recurrent.snapshots = kept, snapshots

    def _batch(self, tokens: Tensor, documents: Tensor) -> Batch:
        """What is empty at the end of a row counts as one more document, of which nobody asks anything."""
        starts = document_starts(documents)
        total, row_len = tokens.numel(), tokens.shape[1]
        most, lengths = pages_for(row_len), starts.diff()
        counts = -(-lengths // PAGE_SIZE)
        first_page = 1 + counts.cumsum(0) - counts
        assert int(counts.sum()) <= self.shape.num_pages, "rows of another kind than those that memory was taken for"
        request = torch.repeat_interleave(torch.arange(len(lengths)), lengths, output_size=total)
        index = torch.arange(total) - starts[request]
        table = torch.where(torch.arange(most) < counts[:, None], first_page[:, None] + torch.arange(most), NULL_PAGE)
        locations = (first_page[request] + index // PAGE_SIZE) * PAGE_SIZE + index % PAGE_SIZE
        numbers = self._up(torch.stack([tokens.flatten().long(), index, request, locations]))
        ids, index, request, locations = numbers.unbind()
        nobody = torch.zeros(len(lengths), dtype=torch.long, device=self.device)
        positions = index if self.target.num_position_axes == 1 else index.expand(self.target.num_position_axes, -1)
        return Batch(
            input_ids=ids,
            positions=positions,
            indices=index,
            query_start=self._up(starts.int()),
            request=request,
            row_slots=request,
            slots=nobody,
            page_table=self._up(table.int()),
            write_locations=locations,
            page_size=PAGE_SIZE,
            max_len=row_len,
            max_rows=row_len,
            recurrence=Recurrence(nobody, nobody[:, None][:, :0]) if self._recurrent else None,
        )

    def _up(self, values: Tensor) -> Tensor:
        """To the device, without waiting for it."""
        return upload(values, self.device)


def document_starts(documents: Tensor) -> Tensor:
    """documents [R, S] -> where they begin among all tokens [D + 1], and where the last one ends."""
    changes = torch.ones(documents.shape, dtype=torch.bool)
    changes[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return torch.cat([changes.flatten().nonzero()[:, 0], torch.tensor([documents.numel()])])


def pages_for(length: int) -> int:
    return -(-length // PAGE_SIZE)
