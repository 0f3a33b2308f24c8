"""Drives a target through the real cache by hand: any chunking, scattered pages, every tap."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.checkpoints.loader import build_target, load_weights
from outrider.engine.cache import Cache, CacheShape
from outrider.engine.request import Request, Work
from outrider.engine.runner import Runner, exact_shape
from outrider.models.base import Target
from outrider.sampling_params import SamplingParams
from outrider.types import Batch, ReadRows


def load_target(path: Path) -> Target:
    checkpoint = open_checkpoint(path)
    target = build_target(checkpoint)
    load_weights(target, checkpoint)
    checkpoint.close()
    return target


def prompt_work(request: Request, start: int, num_rows: int, *, emits: bool) -> Work:
    """Some rows of a prompt."""
    return Work(request, num_rows, 0, emits, start + num_rows)


def last_rows(batch: Batch) -> ReadRows:
    """The last row of each request."""
    count = len(batch.slots)
    return ReadRows(batch.query_start[1:].long() - 1, torch.arange(count + 1, dtype=torch.int32), 1)


class Harness:
    def __init__(self, target: Target, max_len: int = 128, page_size: int = 4, num_slots: int = 3) -> None:
        self.target = target
        pages = -(-max_len // page_size)
        axes = target.num_position_axes
        shape = CacheShape(num_slots * pages + 1, page_size, num_slots, max_len, 0, target.hidden_size, num_axes=axes)
        self.cache = Cache(shape, [target], torch.device("cpu"), torch.float32)
        self.runner = Runner(self.cache, target.vocab_size, torch.device("cpu"))
        order = torch.randperm(num_slots * pages, generator=torch.Generator().manual_seed(7)) + 1
        self.pages = order.view(num_slots, pages).tolist()

    @torch.inference_mode()
    def run(self, prompts: Sequence[Sequence[int]], chunk: int, *, narrow: bool = False) -> list[tuple[Tensor, Tensor]]:
        """Logits [n, V] and all taps [n, layers + 1, H] of every prompt, computed `chunk` rows at a time, together.
        `narrow`: only those of the last row of each chunk, and of all layers but the last."""
        requests = []
        for slot, prompt in enumerate(prompts):
            self.cache.admit(slot, prompt, [])
            self.cache.set_pages(slot, 0, self.pages[slot])
            requests.append(Request(str(slot), list(prompt), SamplingParams(), seed=0, slot=slot))
        taps = tuple(range(self.target.num_layers + (not narrow)))
        found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in prompts]
        for start in range(0, max(len(prompt) for prompt in prompts), chunk):
            plan = [
                prompt_work(request, start, min(chunk, len(request.prompt) - start), emits=True)
                for request in requests
                if start < len(request.prompt)
            ]
            step = self.runner.pack(plan, exact_shape(plan, 0))
            read = last_rows(step.batch) if narrow else None
            hidden = self.target(step.batch, taps, read=read)
            self.cache.state.computed[step.batch.slots] += step.num_rows
            logits = self.target.logits(hidden.last)
            for number, work in enumerate(plan):
                begin, end = step.batch.query_start[number : number + 2].tolist()
                own = slice(number, number + 1) if narrow else slice(begin, end)
                found[work.request.slot].append((logits[own], hidden.taps[begin:end]))
        return [(torch.cat([a for a, _ in parts]), torch.cat([b for _, b in parts])) for parts in found]
