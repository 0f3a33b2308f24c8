"""LLM as vLLM's users have it: arguments, defaults, seeds, tokenizers, prompts, figures."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from outrider import LLM, EngineArgs, SamplingParams, TextPrompt, TokensPrompt
from outrider.metrics import Counter, Gauge, Histogram, Metric, Vector
from outrider.pair import DEFAULT_DIRECTORY

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
TARGET = DEFAULT_DIRECTORY / "target"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=256, seed=5, exact=True) as made:
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the embedded target, whose files may be changed."""
    path = tmp_path_factory.mktemp("model") / "target"
    shutil.copytree(TARGET, path)
    return path


def tokens(llm: LLM, prompt: Any, params: SamplingParams | None = GREEDY, **others: Any) -> list[int]:
    return llm.generate(prompt, params, **others)[0].outputs[0].token_ids


# arguments


def test_arguments_with_another_name(model: Path) -> None:
    given: dict[str, Any] = {"dtype": torch.float32, "max_model_len": "auto", "enable_prefix_caching": None}
    vllms = {"kv_cache_memory_bytes": 2**24, "block_size": 8, "spec_method": "ngram", "spec_tokens": 3}
    with LLM.from_engine_args(EngineArgs(model=str(model), **given, **vllms, tensor_parallel_size=1)) as llm:
        config = llm.config
        assert (config.kv_cache_memory, config.page_size, config.enable_prefix_caching) == (2**24, 8, True)
        assert config.speculative is not None
        assert (config.speculative.method, config.speculative.num_speculative_tokens) == ("ngram", 3)
        assert llm.max_model_len == 2048


def test_quantisation_is_checked(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not quantised, and not awq"):
        LLM(model, quantization="awq")
    with pytest.raises(ValueError, match="max_logprobs is 500"):
        LLM(model, max_logprobs=500)
    shutil.copytree(model, tmp_path / "claimed")
    config = json.loads((model / "config.json").read_text()) | {"quantization_config": {"quant_method": "awq"}}
    (tmp_path / "claimed" / "config.json").write_text(json.dumps(config))
    for name in ("awq", "awq_marlin"):
        LLM(tmp_path / "claimed", quantization=name).close()
    with pytest.raises(ValueError, match="is quantised as awq, and not gptq"):
        LLM(tmp_path / "claimed", quantization="gptq")


def test_a_revision_is_fetched(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def download(name: str, **options: Any) -> str:
        asked.append({"name": name, **options})
        return str(model)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with LLM("org/name", None, revision="v2", download_dir="/cache", hf_token="secret") as llm:
        assert tokens(llm, "Hello")
    wanted = {"name": "org/name", "revision": "v2", "cache_dir": "/cache", "token": "secret"}
    assert [{name: each[name] for name in wanted} for each in asked] == [wanted]
    with pytest.raises(ValueError, match="has no revision 'v2'"):
        LLM(model, revision="v2")


def test_another_tokenizer_and_none(model: Path, tmp_path: Path, target_path: Callable[..., Path]) -> None:
    path = target_path("llama")
    tiny.save_tokenizer(tmp_path)
    with LLM(path, None, tokenizer=tmp_path, max_model_len=64) as llm:
        assert llm.generate("hello", GREEDY)[0].outputs[0].text == llm.get_tokenizer().decode(tokens(llm, "hello"))
    with LLM(model, None, skip_tokenizer_init=True) as llm:
        output = llm.generate(TokensPrompt(prompt_token_ids=[5, 6]), GREEDY)[0].outputs[0]
        assert (len(output.token_ids), output.text) == (6, "")
        with pytest.raises(ValueError, match="needs a tokenizer"):
            llm.generate("hello", GREEDY)
    with pytest.raises(ValueError, match=r"holds no tokenizer\.json"):
        LLM(model, tokenizer=path)


def test_a_chat_template_for_all_chats(tmp_path: Path) -> None:
    template = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"
    (tmp_path / "template.jinja").write_text(template)
    messages = [{"role": "user", "content": "hello"}]
    for given in (template, tmp_path / "template.jinja", str(tmp_path / "template.jinja")):
        with LLM(chat_template=given) as llm:
            assert llm.chat(messages, GREEDY)[0].prompt == "<hello>"
            own = llm.chat(messages, GREEDY, chat_template="{{ messages[0]['content'] }}!")
            assert own[0].prompt == "hello!"
    with pytest.raises(ValueError, match="neither a template nor a file"):
        LLM(chat_template="nowhere.jinja")


def test_seeds_come_from_the_engines() -> None:
    params = SamplingParams(max_tokens=8, temperature=1.0)

    def answers(seed: int | None) -> list[list[int]]:
        with LLM(seed=seed, exact=True) as llm:
            return [output.outputs[0].token_ids for output in llm.generate(["Once", "Once"], params)]

    first = answers(0)
    assert first == answers(0) != answers(1)
    assert first[0] != first[1], "every request has its own"
    assert answers(None) != answers(None)


# defaults


def test_generation_config_holds_where_no_params_are_given(model: Path, tmp_path: Path) -> None:
    def defaults(**given: Any) -> SamplingParams:
        with LLM(model, None, **given) as llm:
            params = llm.get_default_sampling_params()
            if params.max_tokens != 16:
                assert len(tokens(llm, "Once upon a time", None)) == params.max_tokens
                assert [len(each.outputs[0].token_ids) for each in llm.stream("Once upon a time")][-1] == 3
            return params

    advised = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05, "max_new_tokens": 3}
    file = model / "generation_config.json"
    before = file.read_text() if file.is_file() else None
    file.write_text(json.dumps(json.loads(before or "{}") | advised | {"do_sample": True}))
    try:
        expected = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05, max_tokens=3)
        assert defaults() == defaults(generation_config="auto") == expected
        assert defaults(generation_config="vllm") == SamplingParams()
        overridden = defaults(override_generation_config={"temperature": 0.1, "max_new_tokens": 3, "eos_token_id": 4})
        assert (overridden.temperature, overridden.top_k) == (0.1, 20)
        shutil.copy(file, tmp_path)
        file.unlink()
        assert defaults() == SamplingParams()
        assert defaults(generation_config=str(tmp_path)) == expected
        with pytest.raises(ValueError, match=r"a directory with generation_config\.json"):
            LLM(model, generation_config="vlm")
    finally:
        file.unlink(missing_ok=True)
        if before is not None:
            file.write_text(before)


# calls


def test_prompts_in_vllms_forms(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("Once upon a time")
    expected = tokens(llm, "Once upon a time")
    assert tokens(llm, TextPrompt(prompt="Once upon a time")) == expected
    assert tokens(llm, TokensPrompt(prompt_token_ids=ids, prompt="Once", cache_salt="me")) == expected
    assert tokens(llm, "Once upon a time", tokenization_kwargs={"add_special_tokens": True}) == expected
    assert tokens(llm, "Once upon a time", lora_request=None, priority=[0]) == expected
    plain = llm.get_tokenizer().encode("Once upon a time", add_special_tokens=False)
    without = {"add_special_tokens": False}
    assert llm.generate("Once upon a time", GREEDY, tokenization_kwargs=without)[0].prompt_token_ids == plain
    for call, told in (
        (lambda: llm.generate("a", lora_request=object()), "LoRA adapters are not supported"),
        (lambda: llm.generate("a", priority=[3]), "in the order they come"),
        (lambda: llm.chat([{"role": "user", "content": "a"}], loras=1), r"loras: nobody knows it"),
        (
            lambda: llm.generate("a", tokenization_kwargs={"truncation": True}),
            "add_special_tokens alone, not truncation",
        ),
        (lambda: llm.generate({"prompt": "a", "prompt_embeds": 1}), "prompt_embeds=1: prompts are text or tokens"),
    ):
        with pytest.raises(ValueError, match=told):
            call()


def test_a_salt_keeps_prompts_apart(llm: LLM) -> None:
    ids = list(range(40, 80))
    salted = [TokensPrompt(prompt_token_ids=ids, cache_salt=salt) for salt in ("one", "one", "two")]
    cached = [llm.generate(prompt, GREEDY)[0].num_cached_tokens for prompt in salted]
    assert (cached[0], cached[1] > 0, cached[2]) == (0, True, 0)
    assert llm.reset_prefix_cache()
    assert llm.generate(salted[0], GREEDY)[0].num_cached_tokens == 0


def test_what_vllm_has_and_we_do_not_is_named(llm: LLM) -> None:
    with pytest.raises(AttributeError, match=r"beam_search.*use n with a temperature"):
        llm.beam_search(["a"], None)  # type: ignore[attr-defined]
    assert not hasattr(llm, "embed")


def test_a_bar(llm: LLM) -> None:
    class Bar:
        def __init__(self, **options: Any) -> None:
            self.total, self.n, self.closed = 0, 0, False
            bars.append(self)

        def update(self, count: int) -> None:
            self.n += count

        def close(self) -> None:
            self.closed = True

    bars: list[Bar] = []
    llm.generate(["a", "b", "c"], GREEDY, use_tqdm=Bar)
    llm.chat([{"role": "user", "content": "a"}], GREEDY, use_tqdm=Bar)
    assert [(bar.n, bar.total, bar.closed) for bar in bars] == [(3, 3, True), (1, 1, True)]


def test_the_tokenizer_speaks_transformers(llm: LLM) -> None:
    tokenizer, messages = llm.get_tokenizer(), [{"role": "user", "content": "hello"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == llm.chat(messages, GREEDY)[0].prompt
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert ids == llm.chat(messages, GREEDY)[0].prompt_token_ids
    assert str(text).startswith(str(tokenizer.apply_chat_template(messages, tokenize=False)))


# what comes back


def test_logprobs_have_the_tokens_text(llm: LLM) -> None:
    (output,) = llm.generate("Once upon a time", SamplingParams(max_tokens=4, temperature=0, logprobs=2))[0].outputs
    rows = output.logprobs or []
    said = "".join(row[token].decoded_token for row, token in zip(rows, output.token_ids, strict=True))
    assert said == output.text
    assert output.finished()


def test_a_request_tells_its_times(llm: LLM) -> None:
    (output,) = llm.generate("Once upon a time", SamplingParams(max_tokens=9, temperature=0, ignore_eos=True, n=2))
    metrics = output.metrics
    assert metrics is not None
    assert 0 < metrics.queued_ts <= metrics.scheduled_ts <= metrics.first_token_ts < metrics.last_token_ts
    assert metrics.first_token_latency == metrics.first_token_ts - metrics.queued_ts
    assert metrics.num_generation_tokens == 18


def test_figures_are_counted_once() -> None:
    def read(llm: LLM) -> dict[str, Metric]:
        return {metric.name: metric for metric in llm.get_metrics()}

    def value(metric: Metric) -> float:
        assert isinstance(metric, Counter | Gauge)
        return metric.value

    with LLM() as llm:
        assert value(read(llm)["vllm:generation_tokens"]) == 0
        outputs = llm.generate(["Once upon a time", "The little dog"], GREEDY)
        next(llm.stream("Once", GREEDY)).outputs  # noqa: B018  # left: it counts when it is aborted
        found = read(llm)
        speculation = [output.outputs[0].speculation for output in outputs]
        assert value(found["vllm:generation_tokens"]) == 13
        assert value(found["vllm:spec_decode_num_accepted_tokens"]) == sum(each.accepted for each in speculation)
        assert value(found["vllm:spec_decode_num_draft_tokens"]) >= sum(each.drafted for each in speculation)
        at = found["vllm:spec_decode_num_accepted_tokens_per_pos"]
        assert isinstance(at, Vector)
        assert sum(at.values) == value(found["vllm:spec_decode_num_accepted_tokens"]) > 0
        decode = found["vllm:request_decode_time_seconds"]
        assert isinstance(decode, Histogram)
        assert decode.count == decode.buckets["+Inf"] == 3
        reasons = {m.labels["finished_reason"]: m.value for m in llm.get_metrics() if "finished_reason" in m.labels}  # type: ignore[attr-defined]
        assert reasons == {"length": 2, "abort": 1}
        assert value(found["vllm:num_requests_running"]) == 0
