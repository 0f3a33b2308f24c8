"""Chats through the official client: whole and streamed answers are the same, with and without speculation."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from running import Running

from outrider import LLM, SamplingParams, Speculation
from outrider.server.generation import metrics_of

ASKED: Any = [{"role": "user", "content": "Tell me about walking in nature."}]
PLAIN = {"speculative": {"enabled": False}}


def ask(client: openai.OpenAI, **options: Any) -> Any:
    options = {"model": "default", "messages": ASKED, "max_tokens": 30, "temperature": 0} | options
    return client.chat.completions.create(**options)


def joined(chunks: Any) -> tuple[dict[int, str], dict[int, str], dict[int, list[Any]]]:
    """Of each choice: its text, why it ended, its logprobs."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    logprobs: dict[int, list[Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            assert choice.index not in reasons, "nothing comes after the end"
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            logprobs.setdefault(choice.index, []).extend(choice.logprobs.content if choice.logprobs else [])
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, logprobs


def test_the_answer_is_the_engines(client: openai.OpenAI, llm: LLM) -> None:
    expected = llm.chat(ASKED, SamplingParams(temperature=0, max_tokens=30))[0]
    answer = ask(client)
    assert answer.choices[0].message.content == expected.outputs[0].text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == expected.outputs[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == 30
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 30


def test_speculation_figures_are_in_vllms_shape(client: openai.OpenAI) -> None:
    figures = ask(client).metrics["speculative_decoding"]
    steps, accepted = figures["num_spec_steps"], figures["num_accepted_draft_tokens"]
    assert accepted > 0
    assert figures["mean_acceptance_length"] == pytest.approx(1 + accepted / figures["num_rounds"])
    assert figures["num_rounds"] >= steps
    assert figures["draft_acceptance_rate"] == pytest.approx(accepted / figures["num_draft_tokens"])
    histogram = figures["acceptance_histogram"]
    assert sum(histogram) == steps
    assert sum(number * count for number, count in enumerate(histogram)) == accepted
    assert ask(client, extra_body=PLAIN).metrics is None
    assert ask(client, n=2).metrics is None


def test_the_acceptance_length_is_over_all_rounds_as_in_the_log() -> None:
    """Also where the drafter had nothing to say, or rested, in most of them."""
    made = Speculation(rounds=10, drafted=8, accepted=6, drafted_at=(2, 2, 2, 2), accepted_at=(2, 2, 1, 1))
    metrics = metrics_of([made])
    assert metrics is not None
    figures = metrics["speculative_decoding"]
    assert (figures["num_rounds"], figures["num_spec_steps"]) == (10, 2)
    assert figures["mean_acceptance_length"] == made.accept_length == 1.6
    assert sum(figures["acceptance_histogram"]) == 2


def _texts_around(text: str) -> list[dict[str, Any]]:
    """Ways to cut this answer short, most of them inside an accepted run."""
    stops = [text[begin : begin + size] for begin in range(20, 60, 13) for size in (1, 4)]
    return [{"stop": stop} for stop in stops] + [{"max_tokens": count} for count in (1, 7, 26)]


def test_streamed_whole_and_plain_answers_are_the_same(client: openai.OpenAI) -> None:
    text = ask(client).choices[0].message.content
    cases = [*_texts_around(text), {"max_tokens": 120}, {"stop": ["calm", "way to"], "temperature": 1, "seed": 5}]
    reasons = set()
    for options in cases:
        with ThreadPoolExecutor() as pool:  # all at once: none of them may notice
            variants = ({"extra_body": PLAIN}, {}, {"stream": True})
            plain, whole, chunks = pool.map(
                lambda more: ask(client, **more), [{**more, **options} for more in variants]
            )
            texts, ends, _ = joined(chunks)
        choice = whole.choices[0]
        assert choice.message.content == plain.choices[0].message.content == texts[0], options
        assert choice.finish_reason == plain.choices[0].finish_reason == ends[0]
        assert choice.stop_reason == plain.choices[0].stop_reason
        assert whole.usage.completion_tokens == plain.usage.completion_tokens
        reasons.add((choice.finish_reason, choice.stop_reason is None))
    assert reasons == {("stop", True), ("stop", False), ("length", True)}  # end of text, stop string, max_tokens


def test_usage_of_a_stream(client: openai.OpenAI) -> None:
    expected = ask(client).usage
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == expected.completion_tokens
    assert chunks[-1].usage.prompt_tokens == expected.prompt_tokens
    assert chunks[-1].metrics["speculative_decoding"]["num_draft_tokens"] > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices for chunk in ask(client, stream=True))


def test_several_answers_have_seeds_of_their_own(client: openai.OpenAI) -> None:
    options = {"n": 3, "temperature": 1.0, "seed": 11, "max_tokens": 12}
    whole = ask(client, **options)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    streamed, _, _ = joined(ask(client, stream=True, **options))
    assert [streamed[index] for index in range(3)] == texts
    assert [choice.message.content for choice in ask(client, **options).choices] == texts
    assert ask(client, **options | {"n": 1, "seed": 12}).choices[0].message.content == texts[1]
    assert whole.usage.completion_tokens == 36


def test_logprobs(client: openai.OpenAI) -> None:
    options = {"logprobs": True, "top_logprobs": 3}
    whole = ask(client, **options).choices[0]
    assert len(whole.logprobs.content) == 30
    for row in whole.logprobs.content:
        assert len(row.top_logprobs) == 3
        assert row.token == row.top_logprobs[0].token  # greedy
        assert row.logprob == pytest.approx(row.top_logprobs[0].logprob)
    assert b"".join(bytes(row.bytes) for row in whole.logprobs.content).decode() == whole.message.content
    _, _, streamed = joined(ask(client, stream=True, **options))
    plain = ask(client, extra_body=PLAIN, **options).choices[0]
    for other in (streamed[0], plain.logprobs.content):
        assert [row.token for row in other] == [row.token for row in whole.logprobs.content]
        assert [row.logprob for row in other] == pytest.approx(
            [row.logprob for row in whole.logprobs.content], abs=1e-5
        )


def test_parts_of_text_and_token_ids(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "Tell me about "}, {"type": "text", "text": "walking in nature."}]
    answer = ask(client, messages=[{"role": "user", "content": parts}], extra_body={"return_token_ids": True})
    assert answer.choices[0].message.content == ask(client).choices[0].message.content
    assert len(answer.choices[0].token_ids) == len(answer.choices[0].draft_positions) == 30
    assert max(answer.choices[0].draft_positions) > 0


def test_how_much_to_draft(client: openai.OpenAI) -> None:
    figures = ask(client, extra_body={"speculative": {"num_speculative_tokens": 2}}).metrics["speculative_decoding"]
    assert len(figures["acceptance_histogram"]) == 3


def test_a_schema_binds_the_answer(client: openai.OpenAI) -> None:
    pytest.importorskip("xgrammar")
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {**schema, "additionalProperties": False}}}
    answer = ask(client, response_format=form, max_tokens=60)
    assert answer.choices[0].message.content.startswith("{")
    choice = ask(client, extra_body={"guided_choice": ["yes", "no"]}).choices[0]
    assert choice.message.content in ("yes", "no")


def test_unknown_models_and_tools_are_refused(client: openai.OpenAI, running: Running) -> None:
    with pytest.raises(openai.NotFoundError, match="only default"):
        ask(client, model="other")
    with pytest.raises(openai.BadRequestError, match="unknown_field"):
        ask(client, extra_body={"unknown_field": 1})
    with pytest.raises(openai.BadRequestError, match="shorten it"):
        ask(client, messages=[{"role": "user", "content": "word " * 5000}])
