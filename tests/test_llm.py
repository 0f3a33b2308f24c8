"""The public interface: prompts of every kind, text, stops, streaming, aborting, and bad input."""

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from outrider import LLM, SamplingParams
from outrider.config import SpeculativeConfig
from outrider.outputs import total_speculation
from outrider.pair import EMBEDDED_DRAFTERS

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with a tokenizer."""
    path = tiny.save_target(tmp_path_factory.mktemp("text"), "llama")
    tiny.save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def llm(text_model: Path) -> Iterator[LLM]:
    settings = {"method": "draft_model", "model": str(text_model), "num_speculative_tokens": 4, "adaptive": False}
    with LLM(text_model, settings, max_model_len=128, page_size=4) as made:
        yield made  # some tests count drafts, whichever came before them


@pytest.mark.parametrize("method", list(EMBEDDED_DRAFTERS))
def test_embedded_drafters_are_named_by_their_method(method: str) -> None:
    params, prompts = SamplingParams(max_tokens=48, temperature=0), ["Once upon a time", "The old man", "Dear Tom,"]
    with LLM(None, None) as alone:
        plain = [each.outputs[0].token_ids for each in alone.generate(prompts, params)]
    with LLM(None, {"method": method, "adaptive": False}) as drafting:
        outputs = drafting.generate(prompts, params)
        assert [each.outputs[0].token_ids for each in outputs] == plain
        made = total_speculation(outputs)
    assert 0 < made.accepted < made.drafted
    assert made.accept_length > 1.5


def test_prompts_of_every_kind(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode("hello world")
    outputs = llm.generate(["hello world", {"prompt": "hello world"}, {"prompt_token_ids": ids}, ids], GREEDY)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert all(output.prompt_token_ids == ids for output in outputs)
    assert llm.generate("hello world", GREEDY)[0].outputs[0].text == outputs[0].outputs[0].text
    assert llm.generate(ids, GREEDY)[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids
    text = outputs[0].outputs[0].text
    assert text == llm.tokenizer.decode(outputs[0].outputs[0].token_ids)


def test_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    (one,) = llm.chat(messages, GREEDY)
    two, three = llm.chat([messages, messages], GREEDY)
    assert one.outputs[0].token_ids == two.outputs[0].token_ids == three.outputs[0].token_ids
    assert one.prompt is not None
    assert "hello" in one.prompt


def test_outputs_tell_how_it_went(llm: LLM) -> None:
    (output,) = llm.generate("hello world", replace(GREEDY, trace=True, logprobs=2, prompt_logprobs=1, seed=4))
    completion = output.outputs[0]
    assert completion.finish_reason == "length"
    assert completion.seed == 4
    assert completion.speculation.accept_length > 3, "the draft model is the target"
    assert sum(entry["accepted"] + 1 for entry in completion.trace or []) == len(completion.token_ids) - 1
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    assert all(row[token].rank == 1 for row, token in zip(completion.logprobs, completion.token_ids, strict=True))
    assert completion.cumulative_logprob is not None
    assert completion.cumulative_logprob < 0
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert len(completion.draft_positions) == len(completion.text_ends) == len(completion.token_ids)
    assert completion.text_ends[-1] == len(completion.text)
    assert max(completion.draft_positions) == 4
    assert completion.draft_positions[0] == 0, "the first token comes from the prompt's pass"


def test_logprobs_are_the_targets_own(llm: LLM) -> None:
    """Whatever the sampling options, they are those of the model, as transformers computes them."""
    params = replace(GREEDY, logprobs=3, prompt_logprobs=3, temperature=0.7, seed=1, logit_bias={9: 5.0}, top_k=5)
    (output,) = llm.generate([[5, 6, 7, 8]], params)
    tokens = output.prompt_token_ids + output.outputs[0].token_ids
    with torch.no_grad():
        logits = tiny.reference("llama")(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    rows = [*(output.prompt_logprobs or []), *(output.outputs[0].logprobs or [])]
    for place in range(1, len(tokens)):
        row = rows[place]
        assert row is not None
        expected = logits[place - 1]
        assert tokens[place] in row
        assert set(expected.topk(3).indices.tolist()) <= set(row)
        assert all(abs(entry.logprob - float(expected[token])) < 1e-4 for token, entry in row.items())
        assert all(entry.rank == int((expected > expected[token] + 1e-7).sum()) + 1 for token, entry in row.items())


def test_logprobs_in_company(llm: LLM) -> None:
    """All of a round are computed in one go: everybody gets his own, and as many as he asked for."""
    asked = [None, 5, 0, 1, 3]
    prompts = [[5 + number, 6, 7, 8 + number] for number in range(len(asked))]
    params = [replace(GREEDY, logprobs=count, max_tokens=12 + (count or 0)) for count in asked]
    together = llm.generate(prompts, params)
    for prompt, each, output in zip(prompts, params, together, strict=True):
        found = output.outputs[0]
        assert found.logprobs == llm.generate([prompt], each)[0].outputs[0].logprobs
        if each.logprobs is not None:
            assert found.logprobs is not None
            assert len(found.logprobs) == len(found.token_ids)
            assert all(len(row) in (each.logprobs, each.logprobs + 1) for row in found.logprobs)
            assert all(token in row for token, row in zip(found.token_ids, found.logprobs, strict=True))


@pytest.mark.parametrize("num_speculative_tokens", [0, None])
def test_stop_strings_cut_the_text(llm: LLM, num_speculative_tokens: int | None) -> None:
    params = replace(GREEDY, max_tokens=40, num_speculative_tokens=num_speculative_tokens)
    whole = llm.generate("hello", params)[0].outputs[0].text
    stop = whole[9:12]
    before = whole[: whole.index(stop)]
    (cut,) = llm.generate("hello", replace(params, stop=[stop]))[0].outputs
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (before, "stop", stop)
    (kept,) = llm.generate("hello", replace(params, stop=stop, include_stop_str_in_output=True))[0].outputs
    assert kept.text == before + stop
    assert len(cut.token_ids) < 40


def test_end_and_stop_tokens_inside_an_accepted_run(llm: LLM) -> None:
    """The round that is cut there counts with the tokens that were taken."""
    tokens, num_cut = llm.generate("hello", replace(GREEDY, max_tokens=30))[0].outputs[0].token_ids, 0
    for place in range(2, 12):
        stop = tokens[place]
        first = tokens.index(stop)
        (output,) = llm.generate("hello", replace(GREEDY, max_tokens=30, stop_token_ids=[stop]))[0].outputs
        assert output.token_ids == tokens[: first + 1]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        made = output.speculation
        assert made.accept_length * made.rounds == pytest.approx(len(output.token_ids) - 1)  # the prompt brings one
        assert made.ended == (output.draft_positions[-1] > 0)
        num_cut += made.ended
        (length,) = llm.generate("hello", replace(GREEDY, max_tokens=place))[0].outputs
        assert length.token_ids == tokens[:place]
    assert num_cut > 0


def test_the_end_of_text_token_ends_it(target_path: Callable[..., Path]) -> None:
    path = target_path("llama")
    with LLM(path, None, max_model_len=64) as llm:
        tokens = llm.generate([[5, 6]], GREEDY)[0].outputs[0].token_ids
        llm.engine.end_ids = frozenset([tokens[5]])
        (ended,) = llm.generate([[5, 6]], replace(GREEDY, ignore_eos=False))[0].outputs
        assert ended.finish_reason == "stop"
        assert ended.token_ids == tokens[: tokens.index(tokens[5]) + 1]
        (longer,) = llm.generate([[5, 6]], replace(GREEDY, ignore_eos=False, min_tokens=12))[0].outputs
        assert len(longer.token_ids) == 12
        assert tokens[5] not in longer.token_ids[:11]


def test_several_samples_of_one_prompt(llm: LLM) -> None:
    params = replace(GREEDY, n=3, temperature=1.0, seed=7)
    (output,) = llm.generate("hello", params)
    assert len({tuple(each.token_ids) for each in output.outputs}) == 3
    assert [each.index for each in output.outputs] == [0, 1, 2]
    alone = [llm.generate("hello", replace(params, n=1, seed=7 + index))[0].outputs[0] for index in range(3)]
    assert [each.token_ids for each in alone] == [each.token_ids for each in output.outputs]


def test_a_reported_seed_replays(llm: LLM) -> None:
    params = replace(GREEDY, temperature=1.0)
    first = llm.generate("hello", params)[0].outputs[0]
    second = llm.generate("hello", params)[0].outputs[0]
    assert first.token_ids != second.token_ids
    assert llm.generate("hello", replace(params, seed=first.seed))[0].outputs[0].token_ids == first.token_ids


def test_streaming_and_leaving_early(llm: LLM) -> None:
    params = replace(GREEDY, max_tokens=30, seed=1)
    expected = llm.generate("hello", params)[0].outputs[0]
    seen = [output.outputs[0] for output in llm.stream("hello", params)]
    assert seen[-1] == expected
    assert all(later.text.startswith(earlier.text) for earlier, later in itertools.pairwise(seen))
    assert len(seen) < 12, "several tokens come per step"
    stream = llm.stream("hello", params)
    next(stream)
    stream.close()
    assert not llm.engine.has_work
    assert llm.engine.scheduler.pool.num_free == llm.engine.scheduler.pool.capacity


def test_the_context_is_filled_to_the_last_token(llm: LLM) -> None:
    (output,) = llm.generate([[5] * 100], replace(GREEDY, max_tokens=None))
    assert len(output.outputs[0].token_ids) == 28
    assert output.outputs[0].finish_reason == "length"


BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "empty text": ("", "empty"),
    "empty ids": ({"prompt_token_ids": []}, "empty"),
    "unknown id": ([[5, 256]], "256, which is no token id"),
    "negative id": ([[-1]], "no token id"),
    "not a number": ([["a"]], "no token id"),
    "too long": ([[5] * 128], "128 tokens"),
    "no prompt": ({"text": "x"}, "mapping without"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_bad_prompts_are_named_and_harm_nobody(name: str, llm: LLM) -> None:
    bad, message = BAD_PROMPTS[name]
    stream = llm.stream("hello", GREEDY)
    next(stream)
    with pytest.raises(ValueError, match=message):
        llm.generate(["fine", *(bad if isinstance(bad, list) else [bad])], GREEDY)
    rest = list(stream)
    assert rest[-1].outputs[0].token_ids == llm.generate("hello", GREEDY)[0].outputs[0].token_ids
    assert not llm.engine.has_work


BAD_PARAMS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": -0.1},
    "top_p": {"top_p": 0.0},
    "top_k": {"top_k": -2},
    "min_p": {"min_p": 1.5},
    "n": {"n": 0},
    "max_tokens": {"max_tokens": 0},
    "min_tokens": {"min_tokens": 20, "max_tokens": 10},
    "logprobs": {"logprobs": 1000},
    "seed": {"seed": 2**63},
    "stop": {"stop": [""]},
    "allowed_token_ids": {"allowed_token_ids": []},
    "bad_words": {"bad_words": [""]},
    "repetition_penalty": {"repetition_penalty": 0.0},
    "presence_penalty": {"presence_penalty": float("nan")},
    "logit_bias": {"logit_bias": {3: float("inf")}},
    "num_speculative_tokens": {"num_speculative_tokens": -1},
}


@pytest.mark.parametrize("name", BAD_PARAMS)
def test_bad_sampling_values_are_named(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**BAD_PARAMS[name])


def test_ids_in_options_must_exist(llm: LLM) -> None:
    for options in ({"logit_bias": {999: 1.0}}, {"allowed_token_ids": [999]}, {"stop_token_ids": [999]}):
        with pytest.raises(ValueError, match="999"):
            llm.generate("hello", SamplingParams(**options))
    with pytest.raises(ValueError, match="999"):
        llm.generate("hello", SamplingParams(bad_words=[[999]]))
    with pytest.raises(ValueError, match="2 prompts but 3"):
        llm.generate(["a", "b"], [GREEDY] * 3)


def test_without_a_tokenizer_ids_work_and_text_is_refused(target_path: Callable[..., Path]) -> None:
    with LLM(target_path("llama"), None, max_model_len=64) as llm:
        assert len(llm.generate([[5, 6]], GREEDY)[0].outputs[0].token_ids) == 12
        for bad in ({"prompts": "text"}, {"prompts": [[5]], "sampling_params": replace(GREEDY, stop=["x"])}):
            with pytest.raises(ValueError, match="tokenizer"):
                llm.generate(**bad)


BAD_SPECULATION: dict[str, tuple[dict[str, Any], str]] = {
    "unknown method": ({"method": "psychic"}, "unknown speculative method 'psychic'; known: "),
    "unknown key": ({"method": "ngram", "lookahed": 3}, "does not know lookahed"),
    "nothing": ({}, 'needs a "method"'),
    "count": ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens"),
    "lookup": ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 2}, "prompt_lookup_min"),
    "no model": ({"method": "eagle3"}, 'needs "model"'),
    "no draft model": ({"method": "draft_model"}, 'needs "model"'),
    "needless model": ({"method": "ngram", "model": "x/y"}, "."),
}


@pytest.mark.parametrize("name", BAD_SPECULATION)
def test_bad_speculative_config(name: str, target_path: Callable[..., Path]) -> None:
    config, message = BAD_SPECULATION[name]
    if name == "needless model":
        config = {**config, "model": str(target_path("llama"))}
    with pytest.raises(ValueError, match=message):
        LLM(target_path("llama"), config, max_model_len=64)


def test_pairs_that_do_not_fit(target_path: Callable[..., Path], tmp_path: Path) -> None:
    other = target_path("llama", vocab_size=2048)
    with pytest.raises(ValueError, match=r"vocabulary of 2048 \(vocab_size\), the target one of 256"):
        LLM(target_path("llama"), {"method": "draft_model", "model": str(other)}, max_model_len=64)
    wide = target_path("llama", hidden_size=128)
    head = tiny.save_eagle3(tmp_path / "head")
    with pytest.raises(ValueError, match="another target"):
        LLM(wide, {"model": str(head)}, max_model_len=64)


def test_bad_engine_settings(target_path: Callable[..., Path]) -> None:
    path = target_path("llama")
    for options, message in (
        ({"max_model_len": 4096}, "beyond the 512 positions"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"dtype": "int3"}, "unknown dtype"),
        ({"device": "toaster"}, "unknown device"),
        ({"kv_cache_memory": 2**60}, "lacks .* GiB: "),
        ({"max_model_len": 512, "kv_cache_memory": 100_000}, "lower max_model_len"),
    ):
        with pytest.raises(ValueError, match=message):
            LLM(path, None, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="does not exist"):
        LLM("/nowhere/at/all", None)


def test_a_request_that_can_never_fit_is_refused_at_once(target_path: Callable[..., Path]) -> None:
    path = target_path("llama")
    with LLM(path, None, max_model_len=64, page_size=4) as llm:
        room = llm.budget.page_bytes * 20
    with LLM(path, None, max_model_len=64, page_size=4, kv_cache_memory=room) as llm:
        outputs = llm.generate([[5] * 30, [6] * 30, [7] * 30], replace(GREEDY, max_tokens=30))
        assert all(len(output.outputs[0].token_ids) == 30 for output in outputs)
        assert llm.engine.scheduler.num_preemptions > 0


def test_memory_counts_both_models(target_path: Callable[..., Path]) -> None:
    path = target_path("llama")
    with LLM(path, None, max_model_len=64) as alone:
        single = alone.budget
    with LLM(path, {"method": "draft_model", "model": str(path)}, max_model_len=64) as both:
        assert both.budget.page_bytes == 2 * single.page_bytes
        assert both.budget.weight_bytes == 2 * single.weight_bytes


def test_other_dtypes_run(target_path: Callable[..., Path], tmp_path: Path) -> None:
    head = tiny.save_eagle3(tmp_path / "head")
    for dtype in ("bfloat16", "float16"):
        with LLM(target_path("llama"), {"model": str(head)}, dtype=dtype, max_model_len=64) as llm:
            assert len(llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids) == 12


def test_close_frees_and_may_be_called_twice(target_path: Callable[..., Path]) -> None:
    llm = LLM(target_path("llama"), None, max_model_len=64)
    llm.close()
    llm.close()
    assert not llm._open


def test_settings_are_frozen() -> None:
    with pytest.raises(AttributeError):
        SpeculativeConfig(method="ngram").method = "other"  # type: ignore[misc]


def test_tenants_do_not_share_pages(target_path: Callable[..., Path]) -> None:
    prompt = list(range(10, 40))
    with LLM(target_path("llama"), None, page_size=4, max_model_len=64) as llm:
        cached = [
            llm.generate([prompt], SamplingParams(max_tokens=2, temperature=0, tenant=tenant))[0].num_cached_tokens
            for tenant in ("a", "b", "a", None, None)
        ]
    assert cached == [0, 0, 28, 0, 28]


def test_a_drafter_may_name_its_target(target_path: Callable[..., Path], tmp_path: Path) -> None:
    """A drafter in speculators' format, given as the model: the target and the number of tokens are in its config."""
    target = target_path("llama")
    path = tiny.save_eagle3(tmp_path / "head")
    config = json.loads((path / "config.json").read_text())
    layer = {**config, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    named = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "draft_vocab_size": tiny.VOCAB,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": str(target), "architectures": ["LlamaForCausalLM"]},
        },
    }
    (path / "config.json").write_text(json.dumps(named))
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    with LLM(path, max_model_len=64) as llm, LLM(target, None, max_model_len=64) as plain:
        assert (str(llm.config.model), llm.engine.lookahead) == (str(target), 3)
        assert llm.config.speculative == SpeculativeConfig(model=str(path), num_speculative_tokens=3)
        tokens = [each.generate([[5, 6, 7]], params)[0].outputs[0].token_ids for each in (llm, plain)]
    assert tokens[0] == tokens[1]
    del named["speculators_config"]["verifier"]
    (path / "config.json").write_text(json.dumps(named))
    with pytest.raises(ValueError, match=r"does not name its target \(verifier\.name_or_path\)"):
        LLM(path)
