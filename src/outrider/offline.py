"""What a call of LLM is given, made uniform: prompts and params as lists, the model's defaults, a bar on the terminal,
and what a stream brings each time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.engine.request import Request
from outrider.generation_config import SAMPLING_KEYS, default_sampling
from outrider.outputs import RequestMetrics, RequestOutput
from outrider.prompts import Prompt
from outrider.sampling_params import RequestOutputKind, SamplingParams

UseTqdm = bool | Callable[..., Any]  # a bar on the terminal, or what makes one, as tqdm does
OnStep = Callable[[int, int], None]
FILE_NAME = "generation_config.json"
_BAR = "Processed prompts"
_PENALTIES = ("presence_penalty", "frequency_penalty")  # vLLM reads them too, though no model's file has them


@dataclass(frozen=True)
class Defaults:
    """How requests without params are sampled."""

    source: str | Path  # "auto": the model's own generation_config.json; "vllm": none; else the directory that has one
    override: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.source not in ("auto", "vllm") and not self._file.is_file():
            raise ValueError(
                f"generation_config must be auto, vllm, or a directory with {FILE_NAME}, not {self.source}"
            )

    @property
    def _file(self) -> Path:
        path = Path(self.source).expanduser()
        return path if path.name == FILE_NAME else path / FILE_NAME

    def params(self, model: str | Path) -> SamplingParams:
        found = {**self._found(model), **self._overriding()}
        if "max_new_tokens" in found:
            found["max_tokens"] = found.pop("max_new_tokens")
        return SamplingParams(**found)

    def _found(self, model: str | Path) -> dict[str, Any]:
        if self.source == "vllm":
            return {}
        if self.source == "auto":
            checkpoint = open_checkpoint(model)
            checkpoint.close()
            return dict(default_sampling(checkpoint.path))
        path = Path(self.source).expanduser()
        file = path if path.name == "generation_config.json" else path / "generation_config.json"
        if not file.is_file():
            raise ValueError(
                f"generation_config must be auto, vllm, or a directory with such a file, not {self.source}"
            )
        return dict(default_sampling(file))

    def _overriding(self) -> dict[str, Any]:
        known = (*SAMPLING_KEYS, *_PENALTIES)
        return {name: value for name, value in self.override.items() if name in known and value is not None}


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    listed = list(prompts)
    if listed and all(isinstance(item, int) for item in listed):
        return [listed]  # type: ignore[list-item]  # one prompt of token ids
    return listed  # type: ignore[return-value]


def params_for(num_prompts: int, params: SamplingParams | Sequence[SamplingParams]) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise ValueError(f"{num_prompts} prompts but {len(params)} SamplingParams: give one, or one for each")
    return list(params)


def tokenized(prompts: list[Prompt], others: Mapping[str, Any]) -> list[Prompt]:
    """Prompts whose texts are encoded as tokenization_kwargs says."""
    given = dict(others.get("tokenization_kwargs") or {})
    special = given.pop("add_special_tokens", True)
    if given:
        raise ValueError(f"tokenization_kwargs takes add_special_tokens alone, not {', '.join(sorted(given))}")
    if special:
        return prompts
    return [_without_special(prompt) for prompt in prompts]


def _without_special(prompt: Prompt) -> Prompt:
    if isinstance(prompt, str):
        return {"prompt": prompt, "add_special_tokens": False}
    return {**prompt, "add_special_tokens": False} if isinstance(prompt, Mapping) else prompt


@contextmanager
def shown_progress(use_tqdm: UseTqdm, on_step: OnStep | None) -> Iterator[OnStep | None]:
    """`on_step`, and a bar that moves as answers end, where one is wanted."""
    if not use_tqdm:
        yield on_step
        return
    if callable(use_tqdm):
        bar = use_tqdm(total=0, desc=_BAR, dynamic_ncols=True)
    else:
        from tqdm.auto import tqdm  # comes with the hub's client, and takes a while to import

        bar = tqdm(total=0, desc=_BAR, dynamic_ncols=True)

    def step(num_finished: int, total: int) -> None:
        bar.total = total
        bar.update(num_finished - bar.n)
        if on_step is not None:
            on_step(num_finished, total)

    try:
        yield step
    finally:
        bar.close()


def of_kind(outputs: Iterator[RequestOutput], kind: RequestOutputKind) -> Iterator[RequestOutput]:
    """Growing outputs, as a request wants them."""
    before: RequestOutput | None = None
    for output in outputs:
        if kind is RequestOutputKind.CUMULATIVE:
            yield output
        elif kind is RequestOutputKind.DELTA:
            yield output.delta(before)
        elif output.finished:
            yield output
        before = output


def metrics_of(requests: Sequence[Request]) -> RequestMetrics:
    """The times and counts of all answers to one prompt."""
    first = requests[0]
    now, starts = time.monotonic(), [each.first_token_at for each in requests if each.first_token_at is not None]
    ends = [each.ended_at if each.ended_at is not None else now for each in requests if each.first_token_at is not None]
    return RequestMetrics(
        arrival_time=time.time() - (now - first.arrived_at),
        queued_ts=first.arrived_at,
        scheduled_ts=first.first_admitted or 0.0,
        first_token_ts=min(starts, default=0.0),
        last_token_ts=max(ends, default=0.0),
        num_generation_tokens=sum(each.num_outputs for each in requests),
        num_preemptions=sum(each.num_preemptions for each in requests),
    )


def output_of(prompt: Prompt, requests: list[Request]) -> RequestOutput:
    """What the requests of one prompt have come to."""
    text = prompt if isinstance(prompt, str) else prompt.get("prompt") if isinstance(prompt, Mapping) else None
    first = requests[0]
    return RequestOutput(
        request_id=first.request_id.rsplit("-", 1)[0],
        prompt=text,
        prompt_token_ids=list(first.prompt),
        outputs=[request.output(index) for index, request in enumerate(requests)],
        prompt_logprobs=list(first.prompt_logprobs) if first.params.prompt_logprobs is not None else None,
        num_cached_tokens=first.num_cached,
        finished=all(request.finished for request in requests),
        metrics=metrics_of(requests),
    )
