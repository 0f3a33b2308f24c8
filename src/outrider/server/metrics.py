"""Prometheus figures. Where vLLM has the same figure it has vLLM's name, so that dashboards and benchmarks find it."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from outrider.engine.engine import Engine
from outrider.server.job import Job

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_CONTEXTS = (256, 1024, 4096, 16384, 65536)  # upper ends of the buckets of context length


@dataclass(frozen=True)
class Round:
    """Drafting of one sequence in one step."""

    num_rounds: int
    num_drafted: int
    accepted_at: list[int]  # by place in the draft
    context_len: int


class Metrics:
    """Written by the engine's thread, read by anyone."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model_name
        self._running = self._gauge("vllm:num_requests_running", "Sequences that are being decoded")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Sequences that wait for their turn")
        self._cache = self._gauge("vllm:kv_cache_usage_perc", "Used share of the cache, 1 is full")
        self._queried = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self._hit = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self._preempted = self._counter("vllm:num_preemptions", "Sequences sent back to the queue")
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of ended requests")
        self._generated = self._counter("vllm:generation_tokens", "Tokens generated")
        self._ended = self._counter("vllm:request_success", "Ended requests", "finished_reason")
        self._first = self._histogram("vllm:time_to_first_token_seconds", "From arrival to the first token")
        self._between = self._histogram("vllm:inter_token_latency_seconds", "Per token, between two steps")
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the end")
        self._queue = self._histogram("vllm:request_queue_time_seconds", "From arrival to the first step")
        self._steps = self._histogram("outrider:step_seconds", "One step of the engine")
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Rounds that had a draft")
        self._draft_tokens = self._counter("vllm:spec_decode_num_draft_tokens", "Tokens drafted")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted")
        self._accepted_at = self._counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted, by place in the draft", "position"
        )
        self._drafts_by = self._counter(
            "outrider:spec_decode_num_drafts_by_context", "Rounds that had a draft, by context length", "context"
        )
        self._accepted_by = self._counter(
            "outrider:spec_decode_num_accepted_tokens_by_context", "Accepted, by context length", "context"
        )
        self._seen = [0, 0, 0]  # queried, hit, preempted, as of the last step

    def text(self) -> bytes:
        return generate_latest(self._registry)

    # what happened

    def stepped(self, engine: Engine, seconds: float) -> None:
        scheduler = engine.scheduler
        self._steps.observe(seconds)
        self._running.set(len(scheduler.running))
        self._waiting.set(len(scheduler.waiting))
        self._cache.set(1 - scheduler.pool.num_free / scheduler.pool.capacity)
        now = [scheduler.stats.queried, scheduler.stats.hit, scheduler.num_preemptions]
        counters = (self._queried, self._hit, self._preempted)
        for counter, value, before in zip(counters, now, self._seen, strict=True):
            counter.inc(value - before)
        self._seen = now

    def started(self, seconds: float) -> None:
        self._queue.observe(seconds)

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def tokens_came(self, seconds: float, count: int) -> None:
        """A step may bring several: each counts with its share of the time."""
        for _ in range(count):
            self._between.observe(seconds / count)

    def generated(self, count: int) -> None:
        self._generated.inc(count)

    def drafted(self, made: Round) -> None:
        accepted = sum(made.accepted_at)
        self._drafts.inc(made.num_rounds)
        self._draft_tokens.inc(made.num_drafted)
        self._accepted.inc(accepted)
        for position, count in enumerate(made.accepted_at):
            if count:
                self._accepted_at.labels(self._model, str(position)).inc(count)
        number = bisect.bisect_left(_CONTEXTS, made.context_len)
        context = f"<={_CONTEXTS[number]}" if number < len(_CONTEXTS) else f">{_CONTEXTS[-1]}"
        self._drafts_by.labels(self._model, context).inc(made.num_rounds)
        self._accepted_by.labels(self._model, context).inc(accepted)

    def job_ended(self, job: Job, outcome: str, seconds: float) -> None:
        self._ended.labels(self._model, outcome).inc()
        self._prompt_tokens.inc(job.num_prompt_tokens)
        self._whole.observe(seconds)

    # making them

    def _gauge(self, name: str, about: str) -> Gauge:
        return Gauge(name, about, ["model_name"], registry=self._registry).labels(self._model)

    def _histogram(self, name: str, about: str) -> Histogram:
        metric = Histogram(name, about, ["model_name"], registry=self._registry, buckets=_SECONDS)
        return metric.labels(self._model)

    def _counter(self, name: str, about: str, label: str | None = None) -> Counter:
        """Prometheus adds _total to the name."""
        metric = Counter(name, about, ["model_name", *([label] if label else [])], registry=self._registry)
        return metric if label else metric.labels(self._model)
