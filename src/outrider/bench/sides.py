"""The sides of a benchmark: each answers the same batches of prompts, with a clock beside it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from outrider.layers.packing import packed_bytes
from outrider.llm import LLM, total_speculation
from outrider.measure import forget_requests
from outrider.models.base import Target
from outrider.sampling_params import SamplingParams, Speculation

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Timing:
    """How long one batch took, answered once."""

    seconds: float
    first_token: float  # seconds until an answer's first token, on average
    steps: int  # passes of the model
    tokens: list[list[int]]
    speculation: Speculation | None = None
    steady: float | None = None  # tokens a second while all requests were decoding, where that can be seen


class Side(Protocol):
    name: str
    pass_bytes: int  # of weights that one pass of the model reads

    def start_run(self) -> None:
        """A run begins: the same prompts as before, of whose answers nothing may be remembered."""

    def answer(self, prompts: Prompts, max_tokens: int) -> Timing: ...

    def close(self) -> None: ...


class OutriderSide:
    """Our own engine, plain or with a drafter. Its prefix cache must be off: runs repeat their prompts."""

    def __init__(self, name: str, llm: LLM) -> None:
        assert not llm.config.enable_prefix_caching
        self.name = name
        self.llm = llm
        self.pass_bytes = bytes_read(llm.target)
        llm.warm_up()

    def start_run(self) -> None:
        forget_requests(self.llm)

    def length(self, number: int, max_tokens: int) -> int:
        """Of the answer to a prompt."""
        return max_tokens

    def answer(self, prompts: Prompts, max_tokens: int) -> Timing:
        lengths = [self.length(number, max_tokens) for number in range(len(prompts))]
        params = [SamplingParams(temperature=0, max_tokens=each, ignore_eos=True) for each in lengths]
        running = self.llm.engine.scheduler.running
        first: dict[str, float] = {}
        steps = 0
        begin = time.perf_counter()

        def on_step(finished: int, total: int) -> None:
            nonlocal steps
            steps += 1
            if len(first) < len(prompts):
                now = time.perf_counter() - begin
                first.update({r.request_id: now for r in running if r.num_outputs and r.request_id not in first})

        outputs = self.llm.generate([list(ids) for ids in prompts], params, on_step=on_step)
        seconds = time.perf_counter() - begin
        return Timing(
            seconds=seconds,
            first_token=sum(first.values()) / len(first) if first else seconds,
            steps=steps,
            tokens=[output.outputs[0].token_ids for output in outputs],
            speculation=total_speculation(outputs) if self.llm.drafter is not None else None,
        )

    def close(self) -> None:
        self.llm.close()


def bytes_read(target: Target) -> int:
    """Every weight is read in a pass, but for an embedding of its own, of which a pass reads a few rows."""
    is_tied = _is_same(target.embed.weight, target.head.weight)
    return packed_bytes(target) - (0 if is_tied else _size(target.embed.weight))


def _is_same(left: Tensor, right: Tensor) -> bool:
    return left is right


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
