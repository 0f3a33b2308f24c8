"""P-EAGLE against a dense recomputation of every round; its dialects; what is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import eagle3_reference as slow
import pytest
import tiny
import torch
from parallel_reference import check_rounds, p_eagle_logits, run, spy
from safetensors.torch import save_file
from samples import save_p_eagle
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.drafters import p_eagle
from outrider.types import Resolved

TAPS = [1, 2, 4]
MASK = 77
PROMPTS = [[7, 8, 9, 10, 11, 12, 13, 14, 15], [50, 60, 70], list(range(30, 51))]
GREEDY = SamplingParams(max_tokens=45, temperature=0, ignore_eos=True, trace=True)
SEEDED = SamplingParams(max_tokens=45, temperature=0.7, seed=5, ignore_eos=True, trace=True)
# options of the tensors, which are keys of config.json too
OPTIONS: dict[str, dict[str, Any]] = {
    "four layers": {"num_layers": 4, "own_embedding": True},
    "shared embedding, reduced vocabulary": {"draft_vocab": 96},
    "own embedding of another size": {"own_embedding": True, "hidden": 32, "norm_before_residual": True},
    "fc_norm": {"fc_norm": True},
    "norm_before_fc, shared head": {"norm_before_fc": True, "own_head": False},
    "last hidden alone": {"use_aux_hidden_state": False, "taps": [4]},
}


def make(directory: Path, options: dict[str, Any]) -> tuple[Path, slow.Head]:
    hidden, draft_vocab = options.get("hidden", 64), options.get("draft_vocab", tiny.VOCAB)
    taps, num_layers = options.get("taps", TAPS), options.get("num_layers", 2)
    flags = {key: value for key, value in options.items() if key in ("fc_norm", "norm_before_fc")}
    settings = {key: options[key] for key in ("norm_before_residual", "use_aux_hidden_state") if key in options}
    own = {key: options[key] for key in ("own_embedding", "own_head") if key in options}
    tensors = tiny.eagle3_tensors(hidden, 64, len(taps), draft_vocab, num_layers=num_layers, **flags, **own)
    use_taps = options.get("use_aux_hidden_state", True)
    if not use_taps:
        del tensors["fc.weight"]
    tensors["mask_hidden"] = torch.randn(1, 1, 64 * len(taps), generator=torch.Generator().manual_seed(3))
    path = tiny.save_eagle3(
        directory,
        tensors,
        hidden=hidden,
        draft_vocab=draft_vocab,
        num_hidden_layers=num_layers,
        eagle_aux_hidden_state_layer_ids=taps,
        target_hidden_size=64,
        ptd_token_id=MASK,
        **flags,
        **settings,
    )
    before = options.get("norm_before_residual", False)
    return path, slow.Head(tensors, num_layers, norm_before_residual=before, use_taps=use_taps, **flags)


def reference(head: slow.Head, taps: list[int]) -> Callable[[list[int], int, int], Tensor]:
    weights = tiny.reference("llama")
    embed = head.tensors.get("embed_tokens.weight", weights.model.embed_tokens.weight.detach())
    lm_head = head.tensors.get("lm_head.weight", weights.lm_head.weight.detach())

    @cache
    def streams(text: tuple[int, ...]) -> Tensor:
        return slow.target_streams("llama", list(text), taps, post_norm=not head.use_taps)

    def logits(text: list[int], length: int, count: int) -> Tensor:
        return p_eagle_logits(head, text[:length], streams(tuple(text))[: length - 1], embed, lm_head, MASK, count)

    return logits


@pytest.mark.parametrize("name", OPTIONS)
def test_every_round_equals_the_dense_reference(
    name: str, target_path: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of a prompt, two requests at a time, the third entering when one leaves."""
    options = OPTIONS[name]
    path, head = make(tmp_path / "head", options)
    seen = spy(monkeypatch, p_eagle)
    settings = {"method": "eagle3", "parallel_drafting": True, "model": str(path), "num_speculative_tokens": 4}
    expected, d2t = reference(head, options.get("taps", TAPS)), head.tensors.get("d2t")
    for params in (GREEDY, SEEDED) if d2t is not None else (GREEDY,):
        outputs = run(target_path("llama"), settings, PROMPTS, params, max_num_seqs=2, max_num_batched_tokens=10)
        check_rounds(outputs, PROMPTS, seen, expected, d2t=d2t, params=params)


def test_fewer_tokens_than_the_method_may_draft(
    target_path: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, head = make(tmp_path / "head", OPTIONS["four layers"])
    seen = spy(monkeypatch, p_eagle)
    params = [replace(GREEDY, num_speculative_tokens=limit) for limit in (2, 1, 0)]
    settings = {"model": str(path), "num_speculative_tokens": 4}
    with LLM(target_path("llama"), settings, max_model_len=96, watchdog=False) as llm:  # such short drafts look dead
        outputs = llm.generate(PROMPTS, params)
    check_rounds(outputs[:2], PROMPTS[:2], seen, reference(head, TAPS))
    longest = [max(len(entry["draft"]) for entry in output.outputs[0].trace or []) for output in outputs]
    assert longest == [2, 1, 0]


def test_neither_company_nor_prefix_hits_change_a_draft(target_path: Callable[..., Path], tmp_path: Path) -> None:
    settings = {"method": "p_eagle", "model": str(save_p_eagle(tmp_path / "head")), "adaptive": False}
    with LLM(target_path("llama"), settings, max_model_len=96, page_size=4) as llm:
        alone = [llm.generate([prompt], SEEDED)[0].outputs[0].trace for prompt in PROMPTS]
        again = llm.generate(PROMPTS[::-1], SEEDED)
    assert again[0].num_cached_tokens == 20
    assert alone[::-1] == [output.outputs[0].trace for output in again]


def spelt(config: dict[str, Any], key: str, value: Any = MASK) -> dict[str, Any]:
    """The mask token under another key."""
    config = {name: each for name, each in config.items() if name != "ptd_token_id"}
    return {**config, "dflash_config": {"mask_token_id": value}} if key.startswith("dflash") else {**config, key: value}


def dialects(tensors: dict[str, Tensor]) -> dict[str, tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]]:
    """The same head as each community would publish it: tensors, config.json, how it is asked for."""
    flat = tiny.eagle3_config(num_hidden_layers=2, ptd_token_id=MASK)
    layer_keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps")
    layer = {key: flat[key] for key in (*layer_keys, "num_key_value_heads", "rope_theta", "vocab_size")}
    parallel = {"method": "eagle3", "parallel_drafting": True}
    prefixed = {f"model.{name}" if name != "lm_head.weight" else name: tensor for name, tensor in tensors.items()}
    mask = tensors["mask_hidden"]
    speculators = {
        "architectures": ["PEagleSpeculator"],
        "speculators_model_type": "peagle",
        "transformer_layer_config": {"model_type": "llama", **layer},
        "draft_vocab_size": tiny.VOCAB,
        "mask_token_id": MASK,
        "eagle_aux_hidden_state_layer_ids": TAPS,
    }
    return {
        "original": (tensors, flat, parallel),
        "recognised by its mask token": (tensors, flat, {}),
        "recognised as eagle3 and told": (tensors, spelt(flat, "dspark_noise_token_id"), {"parallel_drafting": True}),
        "flat": ({**tensors, "mask_hidden": mask.flatten()}, spelt(flat, "pard_token"), {"method": "p_eagle"}),
        "one for each tap": ({**tensors, "mask_hidden": mask.view(3, 64)}, spelt(flat, "dflash"), parallel),
        "automodel": (
            {**prefixed, "model.mask_hidden": mask.view(1, -1)},
            {**spelt(flat, "mask_token_id"), "architectures": ["LlamaEagle3DraftModel"]},
            {},
        ),
        "speculators": (tensors, speculators, {}),
        "speculators, called eagle3": (tensors, speculators, {"method": "eagle3"}),
        "speculators, for vLLM": (tensors, {**speculators, "pard_token": MASK}, parallel),
    }


def save(directory: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> str:
    directory.mkdir()
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def test_every_dialect_is_the_same_head(target_path: Callable[..., Path], tmp_path: Path) -> None:
    _, head = make(tmp_path / "head", {"own_embedding": True})
    traces = {}
    for name, (tensors, config, asked) in dialects(head.tensors).items():
        model = save(tmp_path / name, tensors, config)
        with LLM(target_path("llama"), {**asked, "model": model}, max_model_len=64) as llm:
            assert isinstance(llm.drafter, p_eagle.PEagle), name
            said = llm.drafter.provenance()
            assert said["mask_token"].value == MASK
            assert said["norm_before_residual"].value is False
            params = replace(GREEDY, max_tokens=12)
            traces[name] = llm.generate([[3, 4, 5, 6]], params)[0].outputs[0].trace
    assert all(trace == traces["original"] for trace in traces.values()), traces.keys()


def test_where_a_setting_was_read(target_path: Callable[..., Path], tmp_path: Path) -> None:
    path = save_p_eagle(tmp_path / "head", pard_token=tiny.VOCAB - 1)
    with LLM(target_path("llama"), {"model": str(path)}, max_model_len=64) as llm:
        assert llm.drafter is not None
        said = llm.drafter.provenance()
    assert said["mask_token"] == Resolved(tiny.VOCAB - 1, "config.json pard_token and config.json ptd_token_id")
    assert said["norm_before_residual"].source == "default of P-EAGLE"


def test_other_readings_are_heads_of_the_same_kind(target_path: Callable[..., Path], tmp_path: Path) -> None:
    path = save_p_eagle(tmp_path / "head", eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    with LLM(target_path("llama"), {"model": str(path)}, max_model_len=64) as llm:
        own = llm.drafter
        assert isinstance(own, p_eagle.PEagle)
        readings = {reading.name: reading.apply(own) for reading in own.readings()}
    assert readings.keys() == {"taps +1", "taps -1", "norm_before_residual true"}
    for other in readings.values():
        assert isinstance(other, p_eagle.PEagle)
        assert other.mask_hidden is own.mask_hidden
        assert other.provenance()["mask_token"] == own.mask_token


def test_heads_of_eagle3_stay_what_they_are(target_path: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny.save_eagle3(tmp_path / "head")
    for settings in ({"model": str(path)}, {"model": str(path), "method": "eagle3"}):
        with LLM(target_path("llama"), settings, max_model_len=64) as llm:
            assert not isinstance(llm.drafter, p_eagle.PEagle)


# name: (keys of config.json, tensors (None: left out), settings, message)
BROKEN: dict[str, tuple[dict[str, Any], dict[str, Tensor | None], dict[str, Any], str]] = {
    "no mask token": (
        {"ptd_token_id": None},
        {},
        {},
        "as one of mask_token_id, dspark_noise_token_id, pard_token, ptd_token_id",
    ),
    "two mask tokens": ({"pard_token": 5}, {}, {}, "pard_token says 5, config.json ptd_token_id says 77"),
    "mask token out of range": ({"ptd_token_id": tiny.VOCAB}, {}, {}, f"ids are 0..{tiny.VOCAB - 1}"),
    "mask token no number": ({"ptd_token_id": "77"}, {}, {}, "ptd_token_id must be a whole number .*, not '77'"),
    "no mask_hidden": ({}, {"mask_hidden": None}, {}, "lacks tensor mask_hidden"),
    "mask_hidden too short": ({}, {"mask_hidden": torch.zeros(1, 1, 64)}, {}, r"mask_hidden has shape \(64,\).*192"),
    "mask_hidden twice": ({}, {"model.mask_hidden": torch.zeros(192)}, {}, "nothing uses, tensor .*mask_hidden"),
    "surplus": ({}, {"mask_hidden_2": torch.zeros(3)}, {}, "mask_hidden_2"),
    "no yes or no": ({}, {}, {"parallel_drafting": "yes"}, "must be true or false, not 'yes'"),
    "no head": ({}, {}, {"model": None}, 'needs "model"'),
    "another method": ({}, {}, {"method": "ngram"}, "ngram has no use for parallel_drafting"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_refused(name: str, target_path: Callable[..., Path], tmp_path: Path) -> None:
    config, tensors, settings, message = BROKEN[name]
    _, head = make(tmp_path / "whole", {})
    stored = {key: tensor for key, tensor in {**head.tensors, **tensors}.items() if tensor is not None}
    flat = tiny.eagle3_config(num_hidden_layers=2, ptd_token_id=MASK)
    model = save(tmp_path / "head", stored, {**flat, **config})
    asked = {"method": "eagle3", "parallel_drafting": True, "model": model, **settings}
    with pytest.raises(ValueError, match=message):
        LLM(target_path("llama"), asked, max_model_len=64)
