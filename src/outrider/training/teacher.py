"""The target as a drafter's teacher: what it computed of rows of texts. Where ranks share it, all of them read, and the
first one has the drafter that learns."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from outrider.engine.engine import Engine
from outrider.engine.text_pass import TextPass, TextShape, pages_for
from outrider.models.base import Target
from outrider.training.texts import Rows
from outrider.types import Hidden

MAX_TOKENS = 16384  # that are read at once


class Teacher:
    def __init__(
        self, engine: Engine, target: Target, taps: tuple[int, ...], rows: Rows, most_documents: int | None = None
    ) -> None:
        """`target`: what a drafter learns beside, which has all of the vocabulary; the engine's own, unless ranks share
        that. `rows`: what will be asked for is made of such, each of so many documents at most."""
        row_len = rows.tokens.shape[1]
        rows_at_once = max(MAX_TOKENS // row_len, 1)
        self.target, self._engine = target, engine
        num_pages = pages_of(row_len, rows_at_once, rows.most_documents if most_documents is None else most_documents)
        self.shape = TextShape(taps, num_pages, rows_at_once)
        self._pass = TextPass(engine.target, self.shape)

    @property
    def device(self) -> torch.device:
        return self._pass.device

    def read(self, rows: Rows) -> Hidden:
        """Of all rows on the host; taps [N S, n, H] and last [N S, H]."""
        engine = self._engine
        with engine.workers.watched() if engine.workers is not None else nullcontext():
            if engine.orders is not None:
                engine.orders.read_texts(self.shape, rows.tokens, rows.documents)
            return self._pass.read(rows.tokens, rows.documents)


def pages_of(row_len: int, num_rows: int, most_documents: int) -> int:
    """How many pages any `num_rows` rows take at most."""
    return num_rows * (pages_for(row_len) + most_documents + 1)
