"""Figures of what an LLM has done, in vLLM's names and in the forms of its metrics reader. A request is counted when it
ends: nothing is counted while rounds run."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engine.engine import Engine
from outrider.engine.request import Request

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass
class Metric:
    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """Only grows."""

    value: int


@dataclass
class Vector(Metric):
    """A counter for each place in a draft."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """A figure as it is now, which may go up and down."""

    value: float


@dataclass
class Histogram(Metric):
    """How many were at most so large: {bound: count}, "+Inf" for all of them."""

    count: int
    sum: float
    buckets: dict[str, int]


class Figures:
    """Figures of the requests that have ended. Any thread may count or read."""

    def __init__(self, model_name: str) -> None:
        self._labels = {"model_name": model_name, "engine": "0"}
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(
            (
                *("vllm:prompt_tokens", "vllm:generation_tokens", "vllm:spec_decode_num_drafts"),
                *("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"),
            ),
            0,
        )
        self._accepted_at: list[int] = []
        self._ended: Tally[str] = Tally()
        self._spreads: defaultdict[str, _Spread] = defaultdict(_Spread)

    def add(self, requests: Sequence[Request]) -> None:
        with self._lock:
            for request in requests:
                self._add(request)

    def _add(self, request: Request) -> None:
        speculation = request.speculation
        added = {
            "vllm:prompt_tokens": len(request.prompt),
            "vllm:generation_tokens": request.num_outputs,
            "vllm:spec_decode_num_drafts": speculation.drafted_at[0] if speculation.drafted_at else 0,
            "vllm:spec_decode_num_draft_tokens": speculation.drafted,
            "vllm:spec_decode_num_accepted_tokens": speculation.accepted,
        }
        for name, count in added.items():
            self._counts[name] += count
        self._accepted_at += [0] * (len(speculation.accepted_at) - len(self._accepted_at))
        for position, count in enumerate(speculation.accepted_at):
            self._accepted_at[position] += count
        self._ended[request.finish_reason or "abort"] += 1
        admitted, first, end = request.first_admitted, request.first_token_at, request.ended_at
        if admitted is None or first is None or end is None:
            return
        self._spreads["vllm:time_to_first_token_seconds"].add(first - request.arrived_at)
        self._spreads["vllm:e2e_request_latency_seconds"].add(end - request.arrived_at)
        self._spreads["vllm:request_queue_time_seconds"].add(admitted - request.arrived_at)
        self._spreads["vllm:request_prefill_time_seconds"].add(first - admitted)
        self._spreads["vllm:request_decode_time_seconds"].add(end - first)

    def metrics(self, engine: Engine) -> list[Metric]:
        """All figures in vLLM's names, with those that the engine itself counts."""
        scheduler, pool, labels = engine.scheduler, engine.scheduler.pool, self._labels
        with self._lock:
            found: list[Metric] = [Counter(name, labels, value) for name, value in self._counts.items()]
            position = "vllm:spec_decode_num_accepted_tokens_per_pos"
            found.append(Vector(position, labels, list(self._accepted_at)))
            for reason, count in self._ended.items():
                found.append(Counter("vllm:request_success", {**labels, "finished_reason": reason}, count))
            found += [spread.histogram(name, labels) for name, spread in self._spreads.items()]
        found += [
            Counter("vllm:prefix_cache_queries", labels, scheduler.prefixes.stats.queried),
            Counter("vllm:prefix_cache_hits", labels, scheduler.prefixes.stats.hit),
            Counter("vllm:num_preemptions", labels, scheduler.num_preemptions),
            Gauge("vllm:num_requests_running", labels, len(scheduler.running)),
            Gauge("vllm:num_requests_waiting", labels, len(scheduler.waiting)),
            Gauge("vllm:kv_cache_usage_perc", labels, 1 - pool.num_free / pool.capacity),
        ]
        return found


class _Spread:
    def __init__(self) -> None:
        self._counts, self._sum = [0] * (len(_SECONDS) + 1), 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(_SECONDS, value)] += 1
        self._sum += value

    def histogram(self, name: str, labels: dict[str, str]) -> Histogram:
        buckets, reached = {}, 0
        for bound, count in zip([*map(str, _SECONDS), "+Inf"], self._counts, strict=True):
            reached += count
            buckets[bound] = reached
        return Histogram(name, labels, reached, self._sum, buckets)
