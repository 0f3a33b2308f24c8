"""Combinations: who is heard in which round, and that the model drafter's cache is right whoever was."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from recording import Recorder
from samples import drafter_settings, guide
from typer.testing import CliRunner

from outrider import LLM, RequestOutput, SamplingParams
from outrider.cli import app
from outrider.drafters.base import drafters
from outrider.drafters.combined import LEAST, Combined
from outrider.measure import method_of

GREEDY = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True, trace=True)
SEEDED = replace(GREEDY, temperature=0.8, seed=3)
SMALL: dict[str, Any] = {"max_model_len": 128, "page_size": 4}
PROMPTS = [[3, 4, 5, 6, 7, 3, 4, 5], [7, 8, 9], [20, 21, 20, 21, 20]]


def combined(first: str, last: str, directory: Path, target: Callable[..., Path], family: str = "llama") -> Any:
    settings = drafter_settings(last, directory, target, family)
    method = f"{first}+{settings['method']}"
    of_ngram = {"prompt_lookup_min": 1} if "ngram" in method else {}
    return {**settings, **of_ngram, "method": method, "adaptive": False}


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def truth_of(path: Path, params: SamplingParams) -> list[list[int]]:
    with LLM(path, None, **SMALL) as llm:
        return [p + o for p, o in zip(PROMPTS, ids(llm.generate(PROMPTS, params)), strict=True)]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    ("first", "last", "family"),
    [
        ("ngram", "eagle3", "llama"),
        ("suffix", "draft_model", "qwen3"),
        ("ngram", "draft_model", "nemotron_h"),
        ("suffix", "eagle3", "deepseek_v3"),
        ("suffix+ngram", "eagle3", "gemma4"),
        ("ngram", "gemma4_assistant", "gemma4"),
        ("suffix", "ngram", "llama"),
        ("ngram", "p_eagle", "llama"),
        ("suffix", "pard", "llama"),
    ],
)
def test_the_text_is_the_target_s(
    first: str, last: str, family: str, params: SamplingParams, target_path: Callable[..., Path], tmp_path: Path
) -> None:
    path = target_path(family)
    truth = truth_of(path, params)
    with LLM(path, combined(first, last, tmp_path, target_path, family), **SMALL) as llm:
        assert isinstance(llm.drafter, Combined)
        guide(llm.drafter, truth, llm.target.vocab_size)
        outputs = llm.generate(PROMPTS, params)
        assert [p + o for p, o in zip(PROMPTS, ids(outputs), strict=True)] == truth


@pytest.mark.parametrize("last", ["eagle3", "draft_model"])
def test_each_is_heard_with_what_it_would_say_alone(
    last: str, target_path: Callable[..., Path], tmp_path: Path
) -> None:
    """After every text, the draft is the n-gram's own if it has enough to say, else the other's own, unspoilt by the
    rounds in which it was not heard."""
    path = target_path("llama")
    params = replace(SEEDED, allowed_token_ids=[3, 4, 5, 6])  # a text that repeats itself now and then
    truth = truth_of(path, params)
    single = drafter_settings(last, tmp_path / "single", target_path, "llama")
    said: dict[str, dict[tuple[int, ...], list[int]]] = {}
    for name, settings in {
        "first": {"method": "ngram", "prompt_lookup_min": 1},
        "last": single,
        "both": {**single, "method": f"ngram+{last}", "prompt_lookup_min": 1},
    }.items():
        recorder = Recorder()
        with LLM(path, {**settings, "adaptive": False}, max_num_batched_tokens=7, max_num_seqs=3, **SMALL) as llm:
            assert llm.drafter is not None
            recorder.watch(llm.drafter)
            guide(llm.drafter, truth, tiny.VOCAB, skill=0.8)
            llm.generate(PROMPTS, params)
        said[name] = recorder.drafts
    heard = {"first": 0, "last": 0}
    for text, draft in said["both"].items():
        if text not in said["first"] or text not in said["last"]:
            continue  # another path through the same text
        name = "first" if len(said["first"][text]) >= LEAST else "last"
        heard[name] += 1
        assert draft == said[name][text], f"after {len(text)} tokens"
    assert min(heard.values()) > 5, heard


def test_whether_rounds_can_be_recorded(target_path: Callable[..., Path]) -> None:
    for method, able in (("ngram+draft_model", True), ("suffix+draft_model", False)):
        settings = {"method": method, "model": str(target_path("llama")), "num_speculative_tokens": 2}
        with LLM(target_path("llama"), settings, max_model_len=64) as llm:
            assert llm.drafter is not None
            assert llm.drafter.recordable is able


def test_prefix_hits_and_company_change_nothing(target_path: Callable[..., Path], tmp_path: Path) -> None:
    path = target_path("llama")
    config = combined("ngram", "eagle3", tmp_path, target_path)
    with LLM(path, config, **SMALL) as llm:
        alone = [llm.generate([prompt], GREEDY)[0].outputs[0].trace for prompt in PROMPTS]
        again = llm.generate([PROMPTS[0]], GREEDY)[0]
        assert again.num_cached_tokens
        assert again.outputs[0].trace == alone[0]
    with LLM(path, config, **SMALL) as llm:
        assert [output.outputs[0].trace for output in llm.generate(PROMPTS, GREEDY)] == alone


def test_the_suffix_part_learns(target_path: Callable[..., Path], tmp_path: Path) -> None:
    with LLM(target_path("llama"), combined("suffix", "eagle3", tmp_path, target_path), **SMALL) as llm:
        first, second = (llm.generate([PROMPTS[1]], GREEDY)[0].outputs[0].speculation for _ in range(2))
    assert second.accept_length > first.accept_length + 1


def test_the_last_drafter_rests_where_nobody_needs_it(
    target_path: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, where asking costs nothing: it follows the text, and drafts nothing."""
    depths: list[int] = []
    with LLM(target_path("llama"), combined("suffix", "eagle3", tmp_path, target_path), **SMALL) as llm:
        assert isinstance(llm.drafter, Combined)
        llm.generate([PROMPTS[1]], GREEDY)
        propose = llm.drafter.last.propose
        monkeypatch.setattr(
            llm.drafter.last, "propose", lambda step, *rest: depths.append(step.depth) or propose(step, *rest)
        )
        llm.generate([PROMPTS[1]], GREEDY)
    assert depths.count(0) > len(depths) // 2


def test_settings_and_provenance(target_path: Callable[..., Path], tmp_path: Path) -> None:
    with LLM(target_path("llama"), combined("suffix", "draft_model", tmp_path, target_path), **SMALL) as llm:
        assert llm.drafter is not None
        found = llm.drafter.provenance()
        assert llm.drafter.needs_tokenizer_of_target
        assert method_of(llm) == "suffix+draft_model"
    assert found["suffix: max_spec_factor"].value == 1.0
    assert found["draft_model: architecture"].value == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("eagle3+ngram", "eagle3 does not draft from text alone, so it must come last"),
        ("ngram+eagle3", 'needs "model"'),
        ("ngram+nothing", r"unknown speculative method 'ngram\+nothing'"),
        ("ngram+", r"unknown speculative method 'ngram\+'"),
    ],
)
def test_what_cannot_be_combined(method: str, message: str, target_path: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(target_path("llama"), {"method": method}, **SMALL)


def test_parallel_drafting_is_the_last_one_s(target_path: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="ngram has no use for parallel_drafting"):
        LLM(target_path("llama"), {"method": "suffix+ngram", "parallel_drafting": True}, **SMALL)


def test_a_missing_tensor_is_still_named(target_path: Callable[..., Path], tmp_path: Path) -> None:
    tensors = tiny.eagle3_tensors(64, 64, 3, tiny.VOCAB)
    del tensors["norm.weight"]
    path = tiny.save_eagle3(tmp_path / "head", {**tensors, "mystery.weight": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"lacks tensor norm\.weight"):
        LLM(target_path("llama"), {"method": "ngram+eagle3", "model": str(path)}, **SMALL)


def test_the_registry_answers_to_combinations_and_lists_none() -> None:
    assert "ngram+eagle3" in drafters
    assert drafters["ngram+eagle3"] is drafters["ngram+eagle3"]
    assert not any("+" in name for name in drafters)
    result = CliRunner().invoke(app, ["matrix", "--json"])
    assert not any("+" in name for name in json.loads(result.stdout)["drafters"])
