"""What is done on a GPU before the first request: kernels are compiled and rounds recorded, so that nobody waits for it
later."""

from __future__ import annotations

import torch

from outrider.engine.engine import Engine
from outrider.engine.policy import FixedDepth
from outrider.engine.request import Request
from outrider.sampling_params import SamplingParams

LENGTHS = (2, 6, 12, 24, 48, 200)  # few rows, some, many: each have kernels of their own


@torch.inference_mode()
def warm_up(engine: Engine) -> None:
    graphs, drafting, limits = engine.graphs, engine.drafting, engine.scheduler.limits
    if engine.runner.device.type == "cpu" and graphs is None:
        return
    if graphs is not None and drafting.is_recordable:
        may_rest = drafting.drafter is not None
        shapes = graphs.usual_shapes(drafting.policy.depths, limits.max_num_batched_tokens, may_rest=may_rest)
        graphs.warm_up(shapes)
        if drafting.remembers:
            graphs.warm_up_catching_up(engine.cache.shape.num_missable)
    room = engine.scheduler.pool.capacity * limits.page_size - 1 - engine.lookahead
    room = min(engine.max_model_len, room)
    with engine.drafting_with(FixedDepth(engine.lookahead)):  # nothing is to be learnt from this
        for length in LENGTHS:  # what may not be recorded: prompts, and what a drafter sees after a rest
            _run_alone(engine, min(length, room - 2), 2)
            _run_alone(engine, 2, min(length, engine.cache.shape.num_missable, room - 2), num_drafts=0)


def _run_alone(engine: Engine, prompt_len: int, max_tokens: int, num_drafts: int | None = None) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, num_speculative_tokens=num_drafts)
    request = Request(f"warm-up-{prompt_len}-{max_tokens}", [0] * prompt_len, params, seed=0)
    engine.add(request)
    while not request.finished:
        if request.num_outputs == max_tokens - 2:
            engine.drafting.catch_up([request])
        engine.step()
