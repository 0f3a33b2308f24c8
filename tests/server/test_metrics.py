"""/metrics: every figure is there in vLLM's name, and they add up to what the answers said."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from running import Running, Serve, wait_for

from outrider.server.engine_client import QueueLimits

PATH = "/v1/completions"
BODY = {"prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": True, "temperature": 0}

COUNTERS = {
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:request_success",
    "vllm:num_preemptions",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:spec_decode_num_drafts",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos",
    "outrider:spec_decode_num_drafts_by_context",
    "outrider:spec_decode_num_draft_tokens_by_context",
    "outrider:spec_decode_num_accepted_tokens_by_context",
    "outrider:spec_decode_num_draft_tokens_per_pos",
    "outrider:requests_refused",
}
GAUGES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "outrider:spec_decode_depth",
}
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_inference_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_params_max_tokens",
    "vllm:request_params_n",
    "outrider:step_seconds",
    "outrider:spec_decode_acceptance_length",
}


class Scrape:
    """All samples of one look at /metrics."""

    def __init__(self, running: Running) -> None:
        response = running.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        self.families = {family.name: family for family in text_string_to_metric_families(response.text)}
        self._samples = [sample for family in self.families.values() for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        wanted = labels.items()
        found = [each for each in self._samples if each.name == name and wanted <= each.labels.items()]
        return sum(each.value for each in found)

    def labelled(self, name: str, label: str) -> dict[str, float]:
        return {each.labels[label]: each.value for each in self._samples if each.name == name}

    def of_kind(self, kind: str) -> set[str]:
        return {name for name, family in self.families.items() if family.type == kind}


def ask(running: Running, bodies: list[dict[str, Any]]) -> list[Any]:
    with ThreadPoolExecutor(4) as pool:
        responses = list(pool.map(lambda body: running.post(PATH, body), bodies))
    assert all(response.status_code == 200 for response in responses)
    running.wait_until_idle()
    return [response.json() for response in responses]


def test_every_figure_is_there(serve: Serve) -> None:
    with serve() as running:
        scrape = Scrape(running)
    assert scrape.of_kind("counter") >= COUNTERS
    assert scrape.of_kind("gauge") >= GAUGES
    assert scrape.of_kind("histogram") >= HISTOGRAMS


def test_figures_add_up(serve: Serve) -> None:
    with serve() as running:
        answers = ask(running, [BODY | {"prompt": f"{number} birds", "max_tokens": 30 + number} for number in range(8)])
        scrape = Scrape(running)
    usages = [answer["usage"] for answer in answers]
    generated = sum(usage["completion_tokens"] for usage in usages)
    prompts = sum(usage["prompt_tokens"] for usage in usages)
    assert scrape.total("vllm:generation_tokens_total") == generated == sum(range(30, 38))
    assert scrape.total("vllm:prompt_tokens_total") == prompts
    assert scrape.labelled("vllm:request_success_total", "finished_reason") == {"length": 8}
    for name in ("e2e_request_latency", "time_to_first_token", "request_queue_time", "request_decode_time"):
        assert scrape.total(f"vllm:{name}_seconds_count") == 8, name
    assert scrape.total("vllm:request_generation_tokens_sum") == generated
    assert scrape.total("vllm:request_prompt_tokens_sum") == prompts
    assert scrape.total("vllm:request_params_max_tokens_sum") == generated
    assert scrape.total("vllm:inter_token_latency_seconds_count") == generated - 8  # the first of each has its own
    parts = [scrape.total(f"vllm:request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode")]
    whole = scrape.total("vllm:e2e_request_latency_seconds_sum")
    assert 0 < sum(parts) <= whole * 1.01
    inference = scrape.total("vllm:request_inference_time_seconds_sum")
    assert abs(inference - parts[1] - parts[2]) < 1e-3
    assert scrape.total("outrider:step_seconds_count") > 0
    assert scrape.total("outrider:spec_decode_depth") == 5  # tests draft as much as they can
    assert scrape.total("vllm:num_requests_running") == scrape.total("vllm:num_requests_waiting") == 0
    # what was found earlier is kept, and counts as used no longer
    assert scrape.total("vllm:kv_cache_usage_perc") == 0


def test_speculation_adds_up(serve: Serve) -> None:
    with serve() as running:
        answers = ask(running, [BODY | {"temperature": number % 2, "seed": number} for number in range(6)])
        long = {"prompt": "word " * 400, "max_tokens": 30, "ignore_eos": True, "temperature": 0}
        answers += ask(running, [long])
        scrape = Scrape(running)
        ask(running, [BODY | {"speculative": {"enabled": False}}])
        after = Scrape(running)
    figures = [answer["metrics"]["speculative_decoding"] for answer in answers]
    names = {
        "vllm:spec_decode_num_drafts_total": "num_spec_steps",
        "vllm:spec_decode_num_draft_tokens_total": "num_draft_tokens",
        "vllm:spec_decode_num_accepted_tokens_total": "num_accepted_draft_tokens",
    }
    for name, field in names.items():
        assert scrape.total(name) == sum(each[field] for each in figures) > 0, name
        assert after.total(name) == scrape.total(name)  # plain requests draft nothing
    accepted = scrape.total("vllm:spec_decode_num_accepted_tokens_total")
    drafted = scrape.total("vllm:spec_decode_num_draft_tokens_total")
    assert 0 < accepted < drafted
    by_place = scrape.labelled("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position")
    assert sum(by_place.values()) == accepted
    in_order = [by_place[place] for place in sorted(by_place, key=int)]
    assert in_order == sorted(in_order, reverse=True)  # the second is accepted only where the first was
    drafted_by_place = scrape.labelled("outrider:spec_decode_num_draft_tokens_per_pos_total", "position")
    assert sum(drafted_by_place.values()) == drafted
    assert drafted_by_place["0"] == scrape.total("vllm:spec_decode_num_drafts_total")
    for what, total in (("accepted_tokens", accepted), ("draft_tokens", drafted)):
        by_context = scrape.labelled(f"outrider:spec_decode_num_{what}_by_context_total", "context")
        assert sum(by_context.values()) == total
        assert len(by_context) > 1, by_context  # there was a long prompt
    lengths = scrape.total("outrider:spec_decode_acceptance_length_sum")
    assert lengths == accepted + scrape.total("vllm:spec_decode_num_drafts_total")  # with the target's own token
    assert scrape.total("outrider:spec_decode_acceptance_length_count") == scrape.total(
        "vllm:spec_decode_num_drafts_total"
    )


def test_the_prefix_cache(serve: Serve) -> None:
    with serve() as running:
        prompt = "A sentence that is long enough to fill some pages of the cache, and then a little more. " * 3
        bodies = [{"prompt": prompt, "max_tokens": 2, "cache_salt": str(time.time())}] * 2
        answers = [ask(running, [body])[0] for body in bodies]
        scrape = Scrape(running)
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached[0] == 0
    assert scrape.total("vllm:prefix_cache_hits_total") == sum(cached) > 0
    assert scrape.total("vllm:prefix_cache_queries_total") >= sum(cached)


def test_requests_that_run_wait_or_are_refused(serve: Serve) -> None:
    long = BODY | {"max_tokens": 1500, "n": 6, "stream": True}
    with serve(QueueLimits(max_queue=2)) as running:
        with httpx.stream("POST", running.url + PATH, json=long, timeout=30) as response:
            lines = response.iter_lines()  # kept: with it the connection would go
            next(lines)
            wait_for(lambda: Scrape(running).total("vllm:num_requests_running") == 4)
            scrape = Scrape(running)
            assert scrape.total("vllm:num_requests_waiting") == 2
            assert 0 < scrape.total("vllm:kv_cache_usage_perc") <= 1
            assert running.post(PATH, BODY).status_code == 429
        running.wait_until_idle()
        scrape = Scrape(running)
        assert scrape.labelled("outrider:requests_refused_total", "reason") == {"queue_full": 1}
        assert scrape.labelled("vllm:request_success_total", "finished_reason") == {"client_closed": 1}
