"""What ranks other than the first do: as they are told, with models, slot tables and pages of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.engine.channel import Channel
from outrider.engine.engine import Engine
from outrider.engine.orders import placing_of, seats_of
from outrider.engine.round import EagerRound
from outrider.engine.stages import StagedParts
from outrider.engine.text_pass import TextPass, TextShape
from outrider.layers.packing import refill


class Follower:
    def __init__(self, engine: Engine, channel: Channel) -> None:
        self._engine, self._channel = engine, channel
        self._rounds: dict[int, EagerRound] = {}  # those that are not finished
        self._texts: TextPass | None = None  # where drafters are taught
        self._is_open = True

    @torch.inference_mode()
    def run(self) -> None:
        """Follows rank 0's orders until it is told to close."""
        while self._is_open:
            orders, tensors = self._channel.receive()
            for order in orders:
                self._obey(order, tensors)
        if self._engine.target.stage is not None:
            self._engine.target.stage.settle()

    def _obey(self, order: dict[str, Any], tensors: Sequence[Tensor]) -> None:
        engine, what = self._engine, order["do"]
        if what == "place":
            placing_of(order, tensors).put(engine.cache, engine.runner.options)
        elif what == "catch_up":
            engine.drafting.see_missed(engine.runner.pack_table(*seats_of(order), missed=True))
        elif what == "forward":
            step = engine.runner.pack_table(*seats_of(order), has_images=order["has_images"])
            step.number = order["number"]
            self._rounds[step.number] = parts = engine.parts.of(step)
            parts.forward()
        elif what == "finish":
            self._finish(order, tensors)
        elif what == "land":
            self._land(order["number"])
        elif what == "logits":
            (place,) = order["states"]
            engine.parts.logits_of(tensors[place].to(engine.runner.device))
        elif what == "read_texts":
            self._read_texts(TextShape(**order["shape"] | {"taps": tuple(order["shape"]["taps"])}), order, tensors)
        elif what == "refill":
            values = {name: tensors[place] for name, place in zip(order["names"], order["values"], strict=True)}
            assert engine.drafter is not None
            refill(engine.drafter, values)
        else:
            assert what == "close", what
            self._is_open = False

    def _read_texts(self, shape: TextShape, order: dict[str, Any], tensors: Sequence[Tensor]) -> None:
        if self._texts is None or self._texts.shape != shape:
            self._texts = TextPass(self._engine.target, shape)
        self._texts.read(*(tensors[place] for place in order["rows"]))

    def _finish(self, order: dict[str, Any], tensors: Sequence[Tensor]) -> None:
        """The rest of a round; in stages, on the last one."""
        number, said = order["number"], order["said"]
        parts, (logits, hidden) = self._rounds[number], order["gathers"]
        is_heard_of = isinstance(parts, StagedParts) and not parts.is_last
        if logits and not is_heard_of:
            self._engine.parts.whole_logits(parts.logits)
        if hidden and not is_heard_of:
            self._engine.parts.last_hidden(parts.hidden)
        parts.draft_width = order["draft_width"]
        parts.choose(None if said is None else (tensors[said[0]], tensors[said[1]]))
        if not isinstance(parts, StagedParts):
            self._land(number)
        elif parts.is_last:
            parts.tell()

    def _land(self, number: int) -> None:
        self._rounds[number].draft()
        self._rounds = {other: left for other, left in self._rounds.items() if other > number}
