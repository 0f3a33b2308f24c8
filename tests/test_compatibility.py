"""The tables of what works are true: of the code, of docs/compatibility.md, and of each other."""

import inspect
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, AsyncLLM, SamplingParams, SpeculativeConfig, StructuredOutputsParams
from outrider.compatibility import llm as tables
from outrider.compatibility import sampling, table
from outrider.compatibility.rules import NoEffect, Refused, Rules
from outrider.drafters.base import drafters

DOCUMENT = Path(__file__).parent.parent / "docs" / "compatibility.md"
CALLED = {
    "LLM": (tables.LLM, tables.OWN),
    "speculative_config": (tables.SPECULATIVE, table._SPECULATIVE),
    "SamplingParams": (sampling.SAMPLING, sampling.FIELDS),
    "StructuredOutputsParams": (sampling.STRUCTURED, sampling.STRUCTURED_FIELDS),
    "calls": (tables.CALLS, table._CALLS),
    "prompts": (tables.PROMPT, {}),
}


@pytest.mark.parametrize("part", table.PARTS)
def test_the_document_says_what_the_code_does(part: str) -> None:
    text = DOCUMENT.read_text()
    assert table.replaced(text, part, table.PARTS[part]()) == text, "run scripts/make_compatibility.py"


@pytest.mark.parametrize("name", CALLED)
def test_every_argument_has_one_rule(name: str) -> None:
    rules, own = CALLED[name]
    counts = Counter([*rules.names(), *own])
    assert [argument for argument, count in counts.items() if count > 1] == []
    assert set(rules.renamed) <= set(rules.works)


def test_what_is_said_to_be_ours_is_ours() -> None:
    init = set(inspect.signature(LLM.__init__).parameters)
    assert set(tables.OWN) <= init
    assert not set(tables.LLM.names()) & init
    assert set(sampling.FIELDS) <= {each.name for each in fields(SamplingParams)}
    assert set(sampling.STRUCTURED_FIELDS) == {each.name for each in fields(StructuredOutputsParams)}
    declared = {setting for name in drafters for setting in drafters[name].own_settings}
    assert set(table._SPECULATIVE) <= {each.name for each in fields(SpeculativeConfig)} | declared
    calls = [inspect.signature(call).parameters for call in (LLM.generate, LLM.chat, AsyncLLM.generate)]
    assert set(table._CALLS) <= {name for parameters in calls for name in parameters}
    assert all(callable(getattr(LLM, name)) for name in table._METHODS)
    assert not any(hasattr(LLM, name) or hasattr(AsyncLLM, name) for name in tables.METHODS)


@pytest.mark.parametrize("name", ["LLM", "speculative_config", "SamplingParams", "StructuredOutputsParams"])
def test_what_asks_for_nothing_is_taken_and_the_rest_refused(name: str) -> None:
    rules, _ = CALLED[name]
    idle: dict[str, Any] = {argument: object() for group in rules.no_effect for argument in group.names}
    assert rules.settle(idle, name) == {}
    for group in rules.refused:
        for argument, taken in group.names.items():
            neutral = [None, "", [], {}, *([] if callable(taken) else taken)]
            assert all(rules.settle({argument: value}, name) == {} for value in neutral)
            for value in ("something else", 17, True if True not in neutral else 17, [1], object()):
                with pytest.raises(ValueError, match=argument):
                    rules.settle({argument: value}, name)


def test_all_that_is_refused_is_named_at_once() -> None:
    rules = Rules({"size": ""}, [NoEffect(["colour"], "all are grey")], [Refused({"wings": (0, 2)}, "it cannot fly")])
    assert rules.settle({"size": 3, "colour": 4, "wings": 2}, "the bird") == {"size": 3}
    with pytest.raises(ValueError, match="the bird cannot take wings=4: it cannot fly; colur: nobody knows it") as told:
        rules.settle({"wings": 4, "size": 3, "colur": 1}, "the bird")
    assert "did you mean colour?" in str(told.value)


def test_llm_names_all_of_them_before_it_loads_anything() -> None:
    with pytest.raises(ValueError, match="LLM cannot take") as told:
        LLM("/nowhere", data_parallel_size=2, enable_lora=True, kv_cache_dtype="fp8", max_model_length=5)
    for word in ("data_parallel_size=2: an engine is one group of ranks", "enable_lora=True: LoRA adapters", "merge"):
        assert word in str(told.value)
    assert "max_model_length: nobody knows it (did you mean max_model_len?)" in str(told.value)


def test_speculative_config_takes_vllms_keys() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 3, "disable_padded_drafter_batch": True}
    neutral = {"rejection_sample_method": "standard", "quantization": None}
    assert SpeculativeConfig.from_dict(given | neutral) == SpeculativeConfig("ngram", num_speculative_tokens=3)
    for vllms, ours in (("deepseek_mtp", "mtp"), ("ngram_gpu", "ngram"), ("eagle3", "eagle3")):
        assert SpeculativeConfig.from_dict({"method": vllms}).method == ours
    with pytest.raises(ValueError, match=r"spec_token_tree=.*drafts are chains"):
        SpeculativeConfig.from_dict(given | {"spec_token_tree": "[(0,)]"})
