"""The target over rows of texts, as it serves them: every document is a request with pages of its own.
Its keys and values lie in memory for this alone, so that an engine which serves the same target is not disturbed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from outrider.engine.upload import upload
from outrider.layers.cached import cached_layers, recurrent_layers
from outrider.models.base import Target
from outrider.training.texts import Rows, Text, fill
from outrider.types import NULL_PAGE, Batch, Hidden, Latent

PAGE_SIZE = 16
MAX_TOKENS = 16384  # that are read at once


def check_target(target: Target) -> None:
    if recurrent_layers(target):
        raise ValueError(
            "targets with recurrent layers cannot be trained for: their states are not kept for whole texts; choose a "
            "target of attention layers"
        )


class Teacher:
    def __init__(self, target: Target, taps: tuple[int, ...], rows: Rows, most_documents: int | None = None) -> None:
        """`rows`: what it will be asked to read is made of such, each of so many documents at most."""
        check_target(target)
        self.target, self.taps = target, taps
        self.rows_at_once = max(MAX_TOKENS // rows.tokens.shape[1], 1)
        self.num_pages = pages_of(rows, self.rows_at_once, most_documents)
        parameter = next(target.parameters())
        self.device, dtype = parameter.device, parameter.dtype
        size = (self.num_pages + 1, PAGE_SIZE)
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

    @torch.no_grad()
    def read(self, rows: Rows) -> Hidden:
        """Of all rows on the host; taps [N S, n, H] and last [N S, H]. What stands in empty places means nothing. A few
        rows at a time: they use the same pages, one after the other."""
        with self._lent():
            parts = [
                self.target(self._batch(rows.take(part)), self.taps)
                for part in torch.arange(len(rows)).split(self.rows_at_once)
            ]
        if len(parts) == 1:
            return parts[0]
        return Hidden(torch.cat([part.last for part in parts]), torch.cat([part.taps for part in parts]))

    @contextmanager
    def _lent(self) -> Iterator[None]:
        """The layers have this memory for a while, then again what they had."""
        before = [layer.pages for layer in self._layers]
        try:
            for layer, pages in zip(self._layers, self._pages, strict=True):
                layer.pages = pages
            yield
        finally:
            for layer, own in zip(self._layers, before, strict=True):
                layer.pages = own

    def _batch(self, rows: Rows) -> Batch:
        """What is empty at the end of a row counts as one more document, of which nobody asks anything."""
        starts = document_starts(rows)
        total, most = rows.tokens.numel(), -(-rows.tokens.shape[1] // PAGE_SIZE)
        lengths = starts.diff()
        counts = -(-lengths // PAGE_SIZE)
        first_page = 1 + counts.cumsum(0) - counts
        assert int(counts.sum()) <= self.num_pages, "rows of another kind than those that memory was taken for"
        request = torch.repeat_interleave(torch.arange(len(lengths)), lengths, output_size=total)
        index = torch.arange(total) - starts[request]
        table = torch.where(torch.arange(most) < counts[:, None], first_page[:, None] + torch.arange(most), NULL_PAGE)
        locations = (first_page[request] + index // PAGE_SIZE) * PAGE_SIZE + index % PAGE_SIZE
        numbers = self._up(torch.stack([rows.tokens.flatten().long(), index, request, locations]))
        tokens, index, request, locations = numbers.unbind()
        positions = index if self.target.num_position_axes == 1 else index.expand(self.target.num_position_axes, -1)
        return Batch(
            input_ids=tokens,
            positions=positions,
            indices=index,
            query_start=self._up(starts.int()),
            request=request,
            row_slots=request,
            slots=torch.arange(len(lengths), device=self.device),
            page_table=self._up(table.int()),
            write_locations=locations,
            page_size=PAGE_SIZE,
            max_len=rows.tokens.shape[1],
            max_rows=rows.tokens.shape[1],
        )

    def _up(self, values: Tensor) -> Tensor:
        """To the device, without waiting for it."""
        return upload(values, self.device)


def size_of(target: Target, tap: int, texts: Sequence[Text], row_len: int) -> float:
    """Root mean square of the target's states after so many layers, of a usual token: the first may be far larger."""
    rows = fill([[texts[0].cut(row_len)]], row_len)
    states = Teacher(target, (tap,), rows).read(rows).taps[: len(texts[0].cut(row_len).tokens), 0].float()
    return float(states.square().mean(-1).sqrt().median())


def document_starts(rows: Rows) -> Tensor:
    """Where documents begin among all tokens [D + 1], and where the last one ends."""
    changes = torch.ones(rows.documents.shape, dtype=torch.bool)
    changes[:, 1:] = rows.documents[:, 1:] != rows.documents[:, :-1]
    return torch.cat([changes.flatten().nonzero()[:, 0], torch.tensor([rows.tokens.numel()])])


def pages_of(rows: Rows, num_rows: int, most_documents: int | None = None) -> int:
    """How many pages any `num_rows` of them take at most."""
    most = rows.most_documents if most_documents is None else most_documents
    return num_rows * (-(-rows.tokens.shape[1] // PAGE_SIZE) + most + 1)
