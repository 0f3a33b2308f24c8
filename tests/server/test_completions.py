"""Completions, tokens, models: the rest of what a client may ask."""

import openai
import pytest
from running import Running

from outrider import LLM, SamplingParams

PROMPT = "The weather today is"


def test_texts_and_token_ids(client: openai.OpenAI, llm: LLM) -> None:
    expected = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=16))[0]
    for prompt in (PROMPT, [PROMPT], expected.prompt_token_ids, [expected.prompt_token_ids]):
        answer = client.completions.create(model="default", prompt=prompt, temperature=0)
        assert answer.choices[0].text == expected.outputs[0].text
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(expected.prompt_token_ids), 16)


def test_several_prompts_with_several_answers_each(client: openai.OpenAI) -> None:
    prompts = [PROMPT, "Once upon a time"]
    options = {"model": "default", "prompt": prompts, "n": 2, "seed": 3, "max_tokens": 8, "echo": True}
    whole = client.completions.create(**options)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    for number, choice in enumerate(whole.choices):
        assert choice.text.startswith(prompts[number // 2])
    texts = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(stream=True, **options):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert list(texts.values()) == [choice.text for choice in whole.choices]


def test_logprobs_are_the_same_streamed(client: openai.OpenAI) -> None:
    options = {"model": "default", "prompt": PROMPT, "temperature": 0, "logprobs": 2, "max_tokens": 20}
    whole = client.completions.create(**options).choices[0].logprobs
    assert whole is not None
    assert whole.tokens is not None
    assert len(whole.tokens) == 20
    gathered: dict[str, list] = {"tokens": [], "text_offset": [], "token_logprobs": []}
    for chunk in client.completions.create(stream=True, **options):
        for name, values in gathered.items():
            values += getattr(chunk.choices[0].logprobs, name)
    assert gathered["tokens"] == whole.tokens
    assert gathered["text_offset"] == whole.text_offset
    assert gathered["token_logprobs"] == pytest.approx(whole.token_logprobs, abs=1e-5)


def test_a_prompt_that_comes_again_is_found(client: openai.OpenAI) -> None:
    options = {"model": "default", "prompt": "one two three " * 30, "max_tokens": 2}
    salted = {"extra_body": {"cache_salt": "of someone else's"}}
    cached = []
    for extra in ({}, {}, salted, salted):
        usage = client.completions.create(**options, **extra).usage  # type: ignore[call-overload]
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == cached[2] == 0
    assert cached[1] == cached[3] > 0


def test_tokenize_and_detokenize(running: Running, llm: LLM) -> None:
    assert llm.tokenizer is not None
    found = running.post("/tokenize", {"prompt": PROMPT, "return_token_strs": True}).json()
    assert found["tokens"] == llm.tokenizer.encode(PROMPT)
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), llm.max_model_len)
    assert "".join(found["token_strs"]) == PROMPT
    assert running.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": PROMPT}
    messages = [{"role": "user", "content": PROMPT}]
    assert (
        running.post("/tokenize", {"messages": messages}).json()["tokens"]
        == llm.chat_prompt(messages)["prompt_token_ids"]
    )


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["default"]
    assert client.models.retrieve("default").object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/one")


def test_metrics_have_vllms_names(running: Running, client: openai.OpenAI) -> None:
    def read() -> dict[str, float]:
        lines = [line for line in running.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}

    before = read()
    messages = [{"role": "user", "content": "Tell me about walking in nature."}]
    answer = client.chat.completions.create(model="default", messages=messages, temperature=0, max_tokens=30)
    figures = answer.metrics["speculative_decoding"]  # type: ignore[attr-defined]
    running.wait_until_idle()
    after = read()

    def grown(name: str, label: str = "") -> float:
        key = f'{name}{{model_name="default"{label}}}'
        return after[key] - before.get(key, 0)

    assert grown("vllm:generation_tokens_total") == 30
    assert grown("vllm:prompt_tokens_total") == answer.usage.prompt_tokens
    assert grown("vllm:spec_decode_num_drafts_total") == figures["num_spec_steps"]
    assert grown("vllm:spec_decode_num_draft_tokens_total") == figures["num_draft_tokens"]
    assert grown("vllm:spec_decode_num_accepted_tokens_total") == figures["num_accepted_draft_tokens"]
    by_place = [grown("vllm:spec_decode_num_accepted_tokens_per_pos_total", f',position="{n}"') for n in range(2)]
    assert by_place == [sum(figures["acceptance_histogram"][n + 1 :]) for n in range(2)]
    assert grown("vllm:time_to_first_token_seconds_count") == 1
    assert grown("outrider:step_seconds_count") > 0
