"""Prometheus figures. Where vLLM has the same figure it has vLLM's name, so that dashboards and benchmarks find it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from outrider.engine.engine import Engine
from outrider.engine.request import Progress
from outrider.engine.scheduler import Scheduler
from outrider.engine.watchdog import AcceptanceCounts, Watchdog, context_bucket
from outrider.server.tally import Tally
from outrider.server.task import Task

_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_LENGTHS = tuple(range(1, 17))  # tokens a round
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """Figures of the engine. Written by the thread that runs it, read by any."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model_name
        tally = Tally(model_name)  # of what is counted in every step
        self._registry.register(tally)
        self._running = self._gauge("vllm:num_requests_running", "Sequences that are being decoded")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Sequences that wait for their turn")
        self._cache = self._gauge("vllm:kv_cache_usage_perc", "Used share of the cache, 1 is full")
        labels = ["model_name", "block_size", "num_gpu_blocks"]
        self._config = Gauge("vllm:cache_config_info", "How the cache is laid out", labels, registry=self._registry)
        self._queried = tally.count("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self._hit = tally.count("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self._preempted = tally.count("vllm:num_preemptions", "Sequences sent back to the queue")
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of ended requests")
        self._generated = tally.count("vllm:generation_tokens", "Tokens generated")
        self._ended = self._counter("vllm:request_success", "Ended requests", "finished_reason")
        self._first = self._histogram("vllm:time_to_first_token_seconds", "From arrival to the first token")
        self._between = tally.spread("vllm:inter_token_latency_seconds", "Per token, between two steps", _SECONDS)
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the end")
        self._queue = self._histogram("vllm:request_queue_time_seconds", "From arrival to the first step")
        self._prefill = self._histogram("vllm:request_prefill_time_seconds", "From the first step to the first token")
        self._decode = self._histogram("vllm:request_decode_time_seconds", "From the first token to the end")
        self._inference = self._histogram("vllm:request_inference_time_seconds", "From the first step to the end")
        self._per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Of each request: decoding, by its tokens after the first"
        )
        self._prompt_len = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request", _COUNTS)
        self._output_len = self._histogram("vllm:request_generation_tokens", "Tokens of an answer", _COUNTS)
        self._max_tokens = self._histogram("vllm:request_params_max_tokens", "max_tokens, where it was given", _COUNTS)
        self._n = self._histogram("vllm:request_params_n", "Answers asked for", _COUNTS)
        self._steps = tally.spread("outrider:step_seconds", "One step of the engine", _SECONDS)
        self._drafts = tally.count("vllm:spec_decode_num_drafts", "Rounds that had a draft")
        self._draft_tokens = tally.count("vllm:spec_decode_num_draft_tokens", "Tokens drafted")
        self._accepted = tally.count("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted")
        self._accepted_at = tally.count(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted, by place in the draft", "position"
        )
        self._drafted_at = tally.count(
            "outrider:spec_decode_num_draft_tokens_per_pos", "Drafted, by place in the draft", "position"
        )
        self._accept_length = tally.spread(
            "outrider:spec_decode_acceptance_length", "Tokens of a round with a draft, the bonus included", _LENGTHS
        )
        self._drafted_by = tally.count(
            "outrider:spec_decode_num_draft_tokens_by_context", "Drafted, by context length", "context"
        )
        self._drafts_by = tally.count(
            "outrider:spec_decode_num_drafts_by_context", "Rounds that had a draft, by context length", "context"
        )
        self._accepted_by = tally.count(
            "outrider:spec_decode_num_accepted_tokens_by_context", "Accepted, by context length", "context"
        )
        self._lately = Gauge(
            "outrider:spec_decode_acceptance",
            "Accepted draft tokens a round of late, by context length; predictions do not count",
            ["model_name", "context"],
            registry=self._registry,
        )
        self._depth = self._gauge("outrider:spec_decode_depth", "Tokens that a round drafts now, at most; 0: none pay")
        self._dead = self._gauge("outrider:spec_decode_dead", "1: of late, next to nothing drafted is accepted")
        self._rebuilds = tally.count("outrider:drafter_rebuilds", "Requests whose memory was computed again")
        self._fallbacks = tally.count("outrider:drafter_fallbacks", "Requests that went on without drafts")
        self._recoveries = tally.count("outrider:drafter_recoveries", "Requests whose drafts are accepted again")
        self._seen = [0, 0, 0]  # queried, hit, preempted, as of the last step
        self._acted = AcceptanceCounts()  # as of the last step
        self._watchdog: Watchdog | None = None

    def text(self) -> bytes:
        if self._watchdog is not None:
            for context, bucket in list(self._watchdog.buckets.items()):
                self._lately.labels(self._model, context).set(bucket.average.accepted)
        return generate_latest(self._registry)

    def watch(self, engine: Engine) -> None:
        """Gauges are read when somebody asks: one set in each step would stay as it was when the last request is
        aborted, and no step follows."""
        scheduler, pool = engine.scheduler, engine.scheduler.pool
        self._running.set_function(lambda: len(scheduler.running))
        self._waiting.set_function(lambda: len(scheduler.waiting))
        self._cache.set_function(lambda: 1 - pool.num_free / pool.capacity)
        self._seen = _counted(scheduler)  # of before do not count
        watchdog = self._watchdog = engine.watchdog
        if watchdog is not None:
            self._dead.set_function(lambda: watchdog.is_dead)
        self._depth.set_function(lambda: engine.drafting.policy.latest)
        shape = engine.cache.shape
        self._config.labels(self._model, str(shape.page_size), str(shape.num_pages)).set(1)

    # what happened

    def stepped(self, engine: Engine, seconds: float) -> None:
        self._steps.add(seconds)
        now = _counted(engine.scheduler)
        counters = (self._queried, self._hit, self._preempted)
        for counter, value, before in zip(counters, now, self._seen, strict=True):
            counter.add(value - before)
        self._seen = now
        if engine.watchdog is not None:
            self._watched(engine.watchdog)

    def _watched(self, watchdog: Watchdog) -> None:
        counts, before = watchdog.counts, self._acted
        self._rebuilds.add(counts.rebuilds - before.rebuilds)
        self._fallbacks.add(counts.fallbacks - before.fallbacks)
        self._recoveries.add(counts.recoveries - before.recoveries)
        self._acted = replace(counts)

    def started(self, seconds: float) -> None:
        self._queue.observe(seconds)

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def tokens_came(self, seconds: float, count: int) -> None:
        """A step may bring several: each counts with its share of the time."""
        self._between.add(seconds / count, count)

    def generated(self, count: int) -> None:
        self._generated.add(count)

    def drafted(self, progress: Progress) -> None:
        """Counts one round of one sequence that had a draft."""
        num_drafted, num_accepted = progress.num_drafted, progress.num_accepted
        self._drafts.add(1)
        self._draft_tokens.add(num_drafted)
        self._accepted.add(num_accepted)
        self._accept_length.add(progress.num_new)
        for position in range(num_drafted):
            self._drafted_at.add_to(str(position), 1)
        for position in range(num_accepted):
            self._accepted_at.add_to(str(position), 1)
        context = context_bucket(len(progress.request.tokens))
        self._drafts_by.add_to(context, 1)
        self._drafted_by.add_to(context, num_drafted)
        self._accepted_by.add_to(context, num_accepted)

    def task_ended(self, task: Task, outcome: str, seconds: float) -> None:
        self._ended.labels(self._model, outcome).inc()
        self._prompt_tokens.inc(task.num_prompt_tokens)
        self._whole.observe(seconds)
        self._prompt_len.observe(task.num_prompt_tokens)
        self._n.observe(task.n)
        self._output_len.observe(task.num_outputs)
        if task.max_tokens is not None:
            self._max_tokens.observe(task.max_tokens)
        if task.started is not None and task.first_token is not None:
            end = task.submitted + seconds
            self._prefill.observe(task.first_token - task.started)
            self._decode.observe(end - task.first_token)
            self._inference.observe(end - task.started)
            if task.num_outputs > len(task.requests):
                self._per_token.observe((end - task.first_token) / (task.num_outputs - len(task.requests)))

    # making them

    def _gauge(self, name: str, about: str) -> Gauge:
        return Gauge(name, about, ["model_name"], registry=self._registry).labels(self._model)

    def _histogram(self, name: str, about: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
        metric = Histogram(name, about, ["model_name"], registry=self._registry, buckets=buckets)
        return metric.labels(self._model)

    def _counter(self, name: str, about: str, label: str | None = None) -> Counter:
        """Prometheus adds _total to the name."""
        metric = Counter(name, about, ["model_name", *([label] if label else [])], registry=self._registry)
        return metric if label else metric.labels(self._model)


def _counted(scheduler: Scheduler) -> list[int]:
    """Tokens that were looked for in pages and found there, and preemptions, since the engine began."""
    stats = scheduler.prefixes.stats
    return [stats.queried, stats.hit, scheduler.num_preemptions]
