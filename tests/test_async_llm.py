"""AsyncLLM: outputs as they come, of many requests at once; aborting, leaving, and errors."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from outrider import LLM, AsyncLLM, Guided, RequestOutput, RequestOutputKind, SamplingParams, TokensPrompt

PARAMS = SamplingParams(max_tokens=12, temperature=0.9, seed=3, ignore_eos=True)
PROMPTS = ["Once upon a time", "The little dog", "In the forest", "My name is"]
Value = TypeVar("Value")


def run(work: Callable[[AsyncLLM], Awaitable[Value]]) -> Value:
    """With an engine of its own, on an event loop of its own."""

    async def whole() -> Value:
        engine = AsyncLLM(max_model_len=256, exact=True)
        try:
            return await asyncio.wait_for(work(engine), 60)
        finally:
            engine.shutdown()

    return asyncio.run(whole())


async def outputs(engine: AsyncLLM, prompt: Any, params: SamplingParams | None, name: str = "") -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, name)]


def test_many_at_once_say_what_each_says_alone() -> None:
    kinds = list(RequestOutputKind)
    params = [replace(PARAMS, output_kind=kinds[i % 3], n=1 + i % 2, seed=i, logprobs=1) for i in range(4)]

    async def work(engine: AsyncLLM) -> list[list[RequestOutput]]:
        return await asyncio.gather(*(outputs(engine, p, each) for p, each in zip(PROMPTS, params, strict=True)))

    found = run(work)
    with LLM(max_model_len=256, exact=True) as llm:
        alone = llm.generate(PROMPTS, [replace(each, output_kind=kinds[0]) for each in params])
    for got, expected, each in zip(found, alone, params, strict=True):
        assert [output.finished for output in got] == [False] * (len(got) - 1) + [True]
        assert (len(got) == 1) == (each.output_kind is RequestOutputKind.FINAL_ONLY)
        for index, completion in enumerate(expected.outputs):
            parts = [part for output in got for part in output.outputs if part.index == index]
            used = parts if each.output_kind is RequestOutputKind.DELTA else parts[-1:]
            assert [token for part in used for token in part.token_ids] == completion.token_ids
            assert "".join(part.text for part in used) == completion.text
            assert [row for part in used for row in part.logprobs or []] == completion.logprobs
            assert (parts[-1].finish_reason, parts[-1].seed) == (completion.finish_reason, completion.seed)
        assert got[-1].prompt_token_ids == expected.prompt_token_ids
        metrics = got[-1].metrics
        assert metrics is not None
        assert 0 < metrics.queued_ts < metrics.first_token_ts <= metrics.last_token_ts


def test_a_request_that_is_aborted_and_one_that_is_left() -> None:
    async def work(engine: AsyncLLM) -> None:
        long = replace(PARAMS, max_tokens=200)
        got = []
        async for output in engine.generate("Once", long, "mine"):
            got.append(output)
            await engine.abort("mine")
        assert (got[-1].finished, got[-1].outputs[0].finish_reason) == (True, "abort")
        assert 0 < len(got[-1].outputs[0].token_ids) < 200
        stream = engine.generate("Once", long, "left")
        await anext(stream)
        await stream.aclose()
        with pytest.raises(ValueError, match="'twice' is running already"):
            await asyncio.gather(*(outputs(engine, "Once", long, "twice") for _ in range(2)))
        while engine.llm.engine.has_work:
            await asyncio.sleep(0.01)
        await engine.abort("nobody")
        await engine.check_health()
        assert b"vllm:generation_tokens_total" in await engine.metrics()

    run(work)


def test_errors_are_the_callers() -> None:
    async def work(engine: AsyncLLM) -> None:
        for prompt, params, told in (
            (TokensPrompt(prompt_token_ids=[]), PARAMS, "empty"),
            ({"text": "a"}, PARAMS, "mapping without"),
            ("a", replace(PARAMS, guided=Guided(regex="(")), "guided: the regex"),
        ):
            with pytest.raises(ValueError, match=told):
                await outputs(engine, prompt, params)
        with pytest.raises(ValueError, match="LoRA"):
            async for _ in engine.generate("a", PARAMS, "a", lora_request=object()):
                pass
        assert (await outputs(engine, "a", None))[-1].finished
        assert engine.get_default_sampling_params() == engine.llm.get_default_sampling_params()

    run(work)


def test_an_engine_that_was_shut_down() -> None:
    async def work(engine: AsyncLLM) -> None:
        engine.shutdown()
        with pytest.raises(RuntimeError, match="ended"):
            await engine.check_health()
        with pytest.raises((RuntimeError, ValueError), match=r"shutting down|closed"):
            await outputs(engine, "a", PARAMS)

    run(work)
