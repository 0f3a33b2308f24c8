"""Gemma 4's assistant against transformers' own, with keys and values of the whole text computed anew each round."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from recording import Recorder
from safetensors.torch import load_file, save_file
from samples import assistant, guide, save_assistant

from outrider import LLM, SamplingParams
from outrider.drafters.gemma4_assistant import Gemma4Assistant
from outrider.engine.policy import FixedDepth

WINDOW = tiny.GEMMA4["sliding_window"]
GREEDY = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True, trace=True)
PROMPTS = [[7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17], [50, 60, 70]]
CENTROIDS = {"use_ordered_embeddings": True, "num_centroids": 16, "centroid_intermediate_top_k": 3}
SMALL: dict[str, Any] = {"max_model_len": 128, "page_size": 4}


def slow_draft(
    target: transformers.PreTrainedModel,
    model: transformers.PreTrainedModel,
    tokens: list[int],
    count: int,
    window: int = WINDOW - 1,
    lag: int = 0,
) -> tuple[list[int], list[torch.Tensor]]:
    """Greedy draft tokens after `tokens`, and their logits. The target has not run the newest token yet; layers with a
    window see so many keys, and drafts are asked for `lag` places before the newest token."""
    ids = torch.tensor([tokens[:-1]])
    with torch.no_grad():
        done = target(input_ids=ids, use_cache=False, output_hidden_states=True, return_shared_kv_states=True)
        shared = {kind: tuple(states) for kind, states in done.shared_kv_states.items()}
        shared["sliding_attention"] = tuple(x[:, :, -window:] for x in shared["sliding_attention"])
        state, token = done.hidden_states[-1][:, -1:], tokens[-1]
        drafted, logits = [], []
        for _ in range(count):
            embedding = target.get_input_embeddings()(torch.tensor([[token]]))
            out = model(
                inputs_embeds=torch.cat([embedding, state], dim=-1),
                position_ids=torch.tensor([[len(tokens) - 1 - lag]]),
                shared_kv_states=shared,
            )
            state, token = out.last_hidden_state, int(out.logits[0, -1].argmax())
            drafted.append(token)
            logits.append(out.logits[0, -1])
    return drafted, logits


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "shared layers in the target": ("gemma4", {}),
    "none there": ("gemma4_dense", {"layer_types": ["full_attention"] * 3}),
    "values are keys, biases": ("gemma4_moe", {"values_are_keys": True, "attention_bias": True}),
    "multimodal": ("gemma4_vision", {}),
    "centroids": ("gemma4", CENTROIDS),
}


@pytest.mark.parametrize("name", CASES)
def test_drafts_equal_the_slow_reference(name: str, target_path: Callable[..., Path], tmp_path: Path) -> None:
    family, settings = CASES[name]
    path = save_assistant(tmp_path / "assistant", **settings)
    target, model = tiny.reference(family), assistant(**settings)
    with LLM(target_path(family), None, **SMALL) as llm:
        truth = [p + o.outputs[0].token_ids for p, o in zip(PROMPTS, llm.generate(PROMPTS, GREEDY), strict=True)]
    recorder, logits = Recorder(), []
    options = {**SMALL, "max_num_batched_tokens": 7, "max_num_seqs": 2}  # the first prompt comes in chunks
    drafting = {"model": str(path), "num_speculative_tokens": 3, "adaptive": False}
    with LLM(target_path(family), drafting, **options) as llm:
        assert isinstance(llm.drafter, Gemma4Assistant)
        recorder.watch(llm.drafter)
        guide(llm.drafter, truth, tiny.VOCAB)
        outputs = llm.generate(PROMPTS, GREEDY)
        llm.drafter.network.head.register_forward_hook(lambda _, __, out: logits.append(out[0]))
        llm.generate(PROMPTS[:1], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
    assert [p + o.outputs[0].token_ids for p, o in zip(PROMPTS, outputs, strict=True)] == truth
    accepted = [entry["accepted"] for output in outputs for entry in output.outputs[0].trace or []]
    assert {0, 1, 2, 3} <= set(accepted), "the run must mix accepted and rejected drafts"
    assert len(recorder.drafts) > 30
    for text, draft in recorder.drafts.items():
        assert draft == slow_draft(target, model, list(text), len(draft))[0], f"after {len(text)} tokens"
    _, expected = slow_draft(target, model, truth[0][: len(PROMPTS[0]) + 1], 3)
    for ours, theirs in zip(logits[:3], expected, strict=True):
        looked_at = ours > -torch.inf
        assert int(looked_at.sum()) == (3 * 16 if "centroids" in name else tiny.VOCAB)
        assert (ours - theirs)[looked_at].abs().max() < 1e-4


READINGS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    f"window of {WINDOW} keys": ({"num_window_keys": WINDOW}, {"window": WINDOW}),
    f"window of {WINDOW + 1} keys": ({"num_window_keys": WINDOW + 1}, {"window": WINDOW + 1}),
    "position of the token before the newest": ({"position_lag": 1}, {"lag": 1}),
}


@pytest.mark.parametrize("name", READINGS)
def test_readings_are_what_other_engines_do(name: str, target_path: Callable[..., Path], tmp_path: Path) -> None:
    """As a reading, and as config.json says it."""
    said, changes = READINGS[name]
    path, told = save_assistant(tmp_path / "assistant"), save_assistant(tmp_path / "told")
    rewrite(told, said, {}, {})
    target, model = tiny.reference("gemma4"), assistant()
    drafting = {"num_speculative_tokens": 3, "adaptive": False, "force": True}
    with LLM(target_path("gemma4"), {"model": str(told), **drafting}, **SMALL) as llm:
        expected = llm.generate([PROMPTS[0]], GREEDY)[0].outputs[0].trace
    with LLM(target_path("gemma4"), {"model": str(path), **drafting}, **SMALL) as llm:
        assert llm.drafter is not None
        before = llm.generate([PROMPTS[0]], GREEDY)[0].outputs[0].trace
        readings = {reading.name: reading for reading in llm.drafter.readings()}
        assert readings.keys() == READINGS.keys()
        ((key, value),) = said.items()
        assert f'"{key}": {value}' in readings[name].advice
        other = readings[name].apply(llm.drafter)
        assert name not in {reading.name for reading in other.readings()}
        with llm.engine.drafting_with(FixedDepth(3), other):
            output = llm.generate([PROMPTS[0]], GREEDY)[0].outputs[0]
        assert llm.generate([PROMPTS[0]], GREEDY)[0].outputs[0].trace == before
    assert output.trace == expected
    text, length, same = PROMPTS[0] + output.token_ids, len(PROMPTS[0]) + 1, True
    for entry in (output.trace or [])[:24]:
        count = len(entry["draft"])
        assert entry["draft"] == slow_draft(target, model, text[:length], count, **changes)[0]
        same = same and entry["draft"] == slow_draft(target, model, text[:length], count)[0]
        length += entry["accepted"] + 1
    assert not same


def test_company_and_prefix_hits_change_nothing(target_path: Callable[..., Path], tmp_path: Path) -> None:
    path = save_assistant(tmp_path / "assistant")
    prompts = [[*range(20, 41)], *PROMPTS]
    params = replace(GREEDY, max_tokens=24)
    settings = {"model": str(path), "adaptive": False}
    with LLM(target_path("gemma4"), settings, **SMALL) as llm:
        alone = [llm.generate([prompt], params)[0] for prompt in prompts]
        again = llm.generate([prompts[0]], params)[0]
        assert again.num_cached_tokens == 20
        assert again.outputs[0].trace == alone[0].outputs[0].trace
    for limits in ({"max_num_seqs": 2}, {"max_num_seqs": 3, "max_num_batched_tokens": 18}):
        with LLM(target_path("gemma4"), settings, **SMALL, **limits) as llm:
            together = llm.generate(prompts, params)
        assert [o.outputs[0].trace for o in together] == [o.outputs[0].trace for o in alone]


def test_sampling_is_the_target_alone(target_path: Callable[..., Path], tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.8, top_p=0.9, seed=5, ignore_eos=True)
    with LLM(target_path("gemma4"), None, **SMALL) as llm:
        plain = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]
    path = save_assistant(tmp_path / "assistant", **CENTROIDS)
    with LLM(target_path("gemma4"), {"model": str(path)}, **SMALL) as llm:
        assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)] == plain


def rewrite(path: Path, outer: dict[str, Any], text: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Changes config.json and the tensors; None takes one away."""
    config = json.loads((path / "config.json").read_text())
    config = {key: value for key, value in {**config, **outer}.items() if value is not None}
    if "text_config" in config:
        config["text_config"] = {k: v for k, v in {**config["text_config"], **text}.items() if v is not None}
    (path / "config.json").write_text(json.dumps(config))
    stored = {**load_file(path / "model.safetensors"), **tensors}
    kept = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(kept, path / "model.safetensors")


@pytest.mark.parametrize("dialect", ["head beside the embedding", "head alone", "untied", "old names of head sizes"])
def test_every_dialect_is_the_same_assistant(dialect: str, target_path: Callable[..., Path], tmp_path: Path) -> None:
    path = save_assistant(tmp_path / "assistant")

    def trace() -> Any:
        with LLM(target_path("gemma4"), {"model": str(path)}, **SMALL) as llm:
            return llm.generate([PROMPTS[0]], GREEDY)[0].outputs[0].trace

    expected = trace()
    head = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    if dialect == "head beside the embedding":
        rewrite(path, {}, {}, {"lm_head.weight": head.clone()})
    elif dialect == "head alone":
        rewrite(path, {}, {}, {"lm_head.weight": head.clone(), "model.embed_tokens.weight": None})
    elif dialect == "untied":
        changed = {"lm_head.weight": head.clone(), "model.embed_tokens.weight": head + 1}
        rewrite(path, {"tie_word_embeddings": False}, {}, changed)
    else:
        rewrite(path, {}, {"per_layer_config": None, "global_head_dim": 32}, {})
    assert trace() == expected


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "another size": ({"backbone_hidden_size": 128}, {}, {}, "backbone_hidden_size is 128"),
    "another vocabulary": ({}, {"vocab_size": 300}, {}, "vocab_size is 300"),
    "other heads": ({}, {"per_layer_config": None, "global_head_dim": 16}, {}, "2 key/value heads of 16"),
    "position": ({"position_lag": 2}, {}, {}, "position_lag"),
    "own keys": ({}, {"num_kv_shared_layers": 1}, {}, "num_kv_shared_layers = 1"),
    "experts": ({}, {"enable_moe_block": True}, {}, "enable_moe_block"),
    "inputs of layers": ({}, {"hidden_size_per_layer_input": 8}, {}, "hidden_size_per_layer_input"),
    "no layer_types": ({}, {"layer_types": None}, {}, "lacks layer_types"),
    "no text_config": ({"text_config": None}, {}, {}, "lacks text_config"),
    "centroids that do not divide": (
        {"use_ordered_embeddings": True, "num_centroids": 7, "centroid_intermediate_top_k": 1},
        {},
        {},
        "num_centroids 7",
    ),
    "centroids that are not there": ({"use_ordered_embeddings": True}, {}, {}, "num_centroids|token_ordering"),
    "missing tensor": ({}, {}, {"post_projection.weight": None}, r"lacks tensor post_projection\.weight"),
    "surplus tensor": ({}, {}, {"mystery.weight": torch.zeros(2)}, r"mystery\.weight"),
    "misshapen tensor": ({}, {}, {"pre_projection.weight": torch.zeros(32, 100)}, r"pre_projection\.weight"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused(name: str, target_path: Callable[..., Path], tmp_path: Path) -> None:
    outer, text, tensors, message = REFUSED[name]
    path = save_assistant(tmp_path / "assistant")
    rewrite(path, outer, text, tensors)
    with pytest.raises(ValueError, match=message):
        LLM(target_path("gemma4"), {"method": "gemma4_assistant", "model": str(path)}, max_model_len=64)


def test_an_ordering_that_leaves_tokens_out_is_refused(target_path: Callable[..., Path], tmp_path: Path) -> None:
    path = save_assistant(tmp_path / "assistant", **CENTROIDS)
    rewrite(path, {}, {}, {"masked_embedding.token_ordering": torch.zeros(tiny.VOCAB, dtype=torch.long)})
    with pytest.raises(ValueError, match="every token id exactly once"):
        LLM(target_path("gemma4"), {"model": str(path)}, max_model_len=64)


def test_other_targets_have_nothing_to_read(target_path: Callable[..., Path], tmp_path: Path) -> None:
    path = save_assistant(tmp_path / "assistant")
    with pytest.raises(ValueError, match="this one shares none"):
        LLM(target_path("llama"), {"model": str(path)}, max_model_len=64)
