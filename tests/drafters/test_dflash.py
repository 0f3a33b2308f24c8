"""The DFlash family against the slow reference, for every option, with drafts accepted, half accepted and rejected."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import dflash_reference as slow
import pytest
import tiny
import tiny_dflash
import torch
import transformers
from safetensors.torch import save_file
from samples import guide

from outrider import LLM, RequestOutput, SamplingParams
from outrider.drafters.base import SHARPNESS
from outrider.drafters.dflash import DFlash
from outrider.drafters.dflash_layers import LayerMask
from outrider.engine.policy import FixedDepth
from outrider.kernels.sampling import gumbel
from outrider.types import Draft, Hidden, Step, Verdict

TAPS = list(tiny_dflash.TAPS)
SLIDING, FULL = "sliding_attention", "full_attention"
PARAMS = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True, trace=True)
PROMPTS = [[7, 8, 9, 10, 11, 12, 13], [50, 60, 70], list(range(100, 121))]
SMALL: dict[str, Any] = {"max_model_len": 160, "page_size": 4}


def nested(**settings: Any) -> dict[str, Any]:
    return {"dflash_config": {**tiny_dflash.dflash_config()["dflash_config"], **settings}}


# name: options of the tensors, keys of config.json, and the reference's options
Option = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
OPTIONS: dict[str, Option] = {
    "plain": ({}, {}, {}),
    "sliding_is_causal": (
        {},
        {"layer_types": [SLIDING, FULL], "sliding_window": 6},
        {"windows": (6, 0), "causal": (True, False)},
    ),
    "sliding_both_ways": (
        {},
        {"layer_types": [SLIDING, FULL], "sliding_window": 3, "is_causal": False},
        {"windows": (3, 0)},
    ),
    "all_sliding": ({}, nested(use_swa=True, swa_window_size=5), {"windows": (5, 5)}),
    "all_sliding_some_causal": (
        {},
        {**nested(use_swa=True, swa_window_size=5), "layer_types": [SLIDING, FULL]},
        {"windows": (5, 5), "causal": (True, False)},
    ),
    "anchored": (
        {},
        {"layer_types": [SLIDING, FULL], "sliding_window": 3, "window_from_anchor": True},
        {"windows": (3, 0), "causal": (True, False), "anchored": True},
    ),
    "anchored_both_ways": (
        {},
        {"layer_types": [FULL, SLIDING], "sliding_window": 2, "window_from_anchor": True, "is_causal": False},
        {"windows": (0, 2), "anchored": True},
    ),
    "last_tap_normed": (
        {},
        {**nested(target_layer_ids=[0, 1, 3]), "tap_after_final_norm": True},
        {},
    ),
    "causal": ({}, nested(causal=True), {"causal": (True, True)}),
    "sinks_and_biases": ({"sinks": True, "bias": True, "head_norm": False}, {"attention_bias": True}, {}),
    "reduced_vocabulary": ({"draft_vocab": 96}, {"draft_vocab_size": 96}, {}),
    "own_sizes": (
        {"hidden": 32, "own_embedding": True, "own_head": True},
        {"hidden": 32, "target_hidden_size": 64, "final_logit_softcapping": 3.0, "output_multiplier": 0.5},
        {"softcap": 3.0, "multiplier": 0.5},
    ),
    "own_mask": ({"own_mask": True}, {"mask_token_id": 99999, "dflash_config": {"target_layer_ids": [0, 1, 2]}}, {}),
    "interleaved_rope": ({}, {"rope_is_neox_style": False}, {"neighbours": True}),
    "one_tap": ({"num_taps": 1}, nested(target_layer_ids=[2]), {}),
    "embedding_tap": ({"num_taps": 2}, nested(target_layer_ids=[-1, 2]), {}),
    "dspark": ({"rank": 12}, tiny_dflash.DSPARK, {"from_anchor": True}),
    "dspark_gated": (
        {"rank": 12, "gated": True, "draft_vocab": 96},
        {**tiny_dflash.DSPARK, "markov_head_type": "gated", "sample_from_anchor": False, "draft_vocab_size": 96},
        {},
    ),
    "dflash2": ({"conv": True, "selector": True}, {**nested(**tiny_dflash.DFLASH2), "is_causal": False}, {}),
}
TAPS_OF = {"one_tap": [3], "embedding_tap": [0, 3], "last_tap_normed": [1, 2, 4]}


def make(directory: Path, name: str) -> tuple[Path, slow.Drafter]:
    tensors, config, options = OPTIONS[name]
    made = tiny_dflash.dflash_tensors(**tensors)
    stored = {key.replace(".sinks", ".attention_sink_bias"): tensor for key, tensor in made.items()}
    return tiny_dflash.save_dflash(directory, stored, **config), slow.Drafter(made, **options)


def target_streams(text: list[int], taps: list[int]) -> torch.Tensor:
    """[n, k, H] from transformers, which gives the last of them after the final norm."""
    with torch.no_grad():
        states = tiny.reference("llama")(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states
    return torch.stack([states[tap][0] for tap in taps], dim=1)


def settings(path: Path, count: int = 4) -> dict[str, Any]:
    return {"model": str(path), "num_speculative_tokens": count, "force": True}


Round = tuple[list[int], list[int], torch.Tensor]  # the text, the draft after it, and its logits


def record(drafter: DFlash) -> list[Round]:
    """Every draft the drafter makes itself, before anyone replaces it."""
    rounds: list[Round] = []
    propose, logits = drafter.propose, drafter.logits
    kept: list[torch.Tensor] = []

    def with_logits(rows: torch.Tensor) -> torch.Tensor:
        kept.append(logits(rows))
        return kept[-1]

    def recorded(step: Step, hidden: Hidden, verdict: Verdict) -> Draft:
        draft = propose(step, hidden, verdict)
        if step.depth:
            each = kept.pop().view(len(draft.count), step.depth, -1)
            for row, slot in enumerate(step.batch.slots.tolist()):
                if int(draft.count[row]):
                    text = step.state.tokens[slot, : int(step.state.lengths[slot])].tolist()
                    rounds.append((text, draft.tokens[row, : step.depth].tolist(), each[row]))
        return draft

    drafter.logits = with_logits  # type: ignore[method-assign]
    drafter.propose = recorded  # type: ignore[method-assign]
    return rounds


def run_guided(llm: LLM, prompts: list[list[int]], truth: list[list[int]], params: Any = PARAMS) -> list[RequestOutput]:
    assert llm.drafter is not None
    guide(llm.drafter, truth, llm.target.vocab_size)
    return llm.generate(prompts, params)


@pytest.fixture(scope="module")
def truth(target_path: Callable[..., Path]) -> list[list[int]]:
    with LLM(target_path("llama"), None, **SMALL) as llm:
        outputs = llm.generate(PROMPTS, replace(PARAMS, max_tokens=64))
    return [prompt + output.outputs[0].token_ids for prompt, output in zip(PROMPTS, outputs, strict=True)]


@pytest.mark.parametrize("name", OPTIONS)
def test_drafts_equal_the_slow_reference(
    name: str, target_path: Callable[..., Path], tmp_path: Path, truth: list[list[int]]
) -> None:
    """In one batch, chunked, with drafts that are accepted, half accepted and rejected."""
    path, drafter = make(tmp_path / "drafter", name)
    weights = tiny.reference("llama")
    embed = drafter.tensors.get("embed_tokens.weight", weights.model.embed_tokens.weight.detach())
    lm_head = drafter.tensors.get("lm_head.weight", weights.lm_head.weight.detach())
    taps = TAPS_OF.get(name, TAPS)
    streams = [target_streams(text, taps) for text in truth]
    with LLM(target_path("llama"), settings(path), max_num_seqs=2, max_num_batched_tokens=11, **SMALL) as llm:
        assert isinstance(llm.drafter, DFlash)
        rounds = record(llm.drafter)
        outputs = run_guided(llm, PROMPTS, truth)
    assert [prompt + output.outputs[0].token_ids for prompt, output in zip(PROMPTS, outputs, strict=True)] == [
        text[: len(prompt) + 48] for prompt, text in zip(PROMPTS, truth, strict=True)
    ]
    accepted = {entry["accepted"] for output in outputs for entry in output.outputs[0].trace or []}
    assert accepted >= {0, 1, 2}
    assert max(len(text) for text, *_ in rounds) > 64, "the run must pass the drafter's max_position_embeddings"
    for text, tokens, logits in rounds[::3] + rounds[-3:]:
        number = next(i for i, known in enumerate(truth) if known[: len(text)] == text)
        seen = streams[number][: len(text) - 1]
        expected, slow_logits, _ = slow.draft(drafter, text[-1], seen, embed, lm_head, len(tokens))
        assert tokens == expected, f"{name}: after {len(text)} tokens"
        if "dspark" not in name and "dflash2" not in name:  # whose logits are corrected afterwards
            torch.testing.assert_close(logits, torch.stack(slow_logits), atol=1e-4, rtol=1e-4)


def test_muse_glimmer_equals_transformers(target_path: Callable[..., Path], tmp_path: Path) -> None:
    """A network that transformers has too, windows on both sides and all."""
    config = transformers.MuseGlimmerAssistantConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=5,
        layer_types=[SLIDING, FULL, SLIDING],
        block_size=6,
        mask_token_id=tiny_dflash.MASK,
        target_layer_ids=[0, 1, 2],
    )
    model = transformers.MuseGlimmerAssistantModel(config).eval()
    tiny.randomise(model, seed=4)
    model.save_pretrained(tmp_path)
    weights = tiny.reference("llama")
    with LLM(target_path("llama"), settings(tmp_path, 5), **SMALL) as llm:
        assert isinstance(llm.drafter, DFlash)
        rounds = record(llm.drafter)
        text = PROMPTS[0] + llm.generate([PROMPTS[0]], PARAMS)[0].outputs[0].token_ids
    streams = target_streams(text, TAPS).flatten(1)
    for known, tokens, logits in rounds[::4]:
        block = torch.tensor([[known[-1], *[tiny_dflash.MASK] * 5]])
        cache = transformers.cache_utils.DFlashCache(config=config)
        cache.set_previous_accepted_tokens(len(known) - 1)
        with torch.no_grad():
            normed = model(
                noise_embeds=weights.model.embed_tokens(block),
                context_hidden_states=streams[None, : len(known) - 1],
                past_key_values=cache,
            ).last_hidden_state
            expected = weights.lm_head(normed)[0, 1:]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        assert tokens == expected.argmax(-1).tolist()
    assert len(rounds) > 20


def test_company_hits_and_chunks_do_not_matter(
    target_path: Callable[..., Path], tmp_path: Path, truth: list[list[int]]
) -> None:
    """A request's drafts are the same alone, among others that come and go, in chunks, and after a prefix hit."""
    params = [replace(PARAMS, max_tokens=20 + 8 * number) for number in range(3)]
    for name in ("sliding_is_causal", "dspark", "dflash2"):
        path, _ = make(tmp_path / name, name)
        with LLM(target_path("llama"), settings(path), **SMALL) as llm:
            together = [o.outputs[0].trace for o in run_guided(llm, PROMPTS, truth, params)]
        with LLM(target_path("llama"), settings(path), max_num_seqs=1, max_num_batched_tokens=6, **SMALL) as llm:
            order = [2, 0, 1]
            outputs = run_guided(llm, [PROMPTS[i] for i in order], truth, [params[i] for i in order])
            alone = [o.outputs[0].trace for o in outputs]
            again = llm.generate([PROMPTS[2]], params[2])[0]
        assert alone == [together[i] for i in order]
        assert again.num_cached_tokens == 20
        assert again.outputs[0].trace == together[2]


def test_a_shorter_block_is_a_block(target_path: Callable[..., Path], tmp_path: Path, truth: list[list[int]]) -> None:
    path, drafter = make(tmp_path, "plain")
    weights = tiny.reference("llama")
    with LLM(target_path("llama"), settings(path, 8), **SMALL) as llm:
        assert isinstance(llm.drafter, DFlash)
        rounds = record(llm.drafter)
        run_guided(llm, PROMPTS[:1], truth, replace(PARAMS, num_speculative_tokens=2))
    streams = target_streams(truth[0], TAPS)
    embed, lm_head = weights.model.embed_tokens.weight.detach(), weights.lm_head.weight.detach()
    for text, tokens, _ in rounds:
        assert tokens == slow.draft(drafter, text[-1], streams[: len(text) - 1], embed, lm_head, 2)[0]


def test_sampled_drafts_use_the_noise_of_their_place(target_path: Callable[..., Path], tmp_path: Path) -> None:
    """So that where the drafter's distribution, made sharper, is the target's, so is its choice."""
    path, _ = make(tmp_path, "plain")
    params = SamplingParams(max_tokens=24, temperature=0.7, seed=5, ignore_eos=True)
    with LLM(target_path("llama"), settings(path), **SMALL) as llm:
        assert isinstance(llm.drafter, DFlash)
        rounds = record(llm.drafter)
        llm.generate([PROMPTS[0]], params)
    for text, tokens, logits in rounds:
        places = len(text) + torch.arange(len(tokens))
        noise = gumbel(torch.full((len(tokens),), 5), places, torch.arange(tiny.VOCAB))
        assert tokens == (logits * SHARPNESS / 0.7 + noise).argmax(-1).tolist()


def test_confidence_shortens_drafts(target_path: Callable[..., Path], tmp_path: Path, truth: list[list[int]]) -> None:
    path, drafter = make(tmp_path, "dspark")
    weights = tiny.reference("llama")
    embed, lm_head = weights.model.embed_tokens.weight.detach(), weights.lm_head.weight.detach()
    with LLM(target_path("llama"), {**settings(path), "confidence_threshold": 0.1}, **SMALL) as llm:
        assert isinstance(llm.drafter, DFlash)
        output = llm.generate([PROMPTS[0]], PARAMS)[0].outputs[0]
    assert PROMPTS[0] + output.token_ids == truth[0][: len(PROMPTS[0]) + 48]
    streams, length, counts = target_streams(truth[0], TAPS), len(PROMPTS[0]) + 1, set()
    for entry in (output.trace or [])[:-4]:  # the last rounds are cut short by max_tokens
        tokens, _, chances = slow.draft(drafter, truth[0][length - 1], streams[: length - 1], embed, lm_head, 4)
        reached = torch.tensor(chances).cumprod(0)
        count = int((reached >= 0.1).sum())
        assert entry["draft"] == tokens[:count]
        counts.add(count)
        length += entry["accepted"] + 1
    assert len(counts) > 1
    with pytest.raises(ValueError, match="confidence_threshold must be a number from 0 to 1, not 2"):
        LLM(target_path("llama"), {**settings(path), "confidence_threshold": 2.0}, **SMALL)


# dialects


def speculators(kind: str, **settings: Any) -> dict[str, Any]:
    flat = tiny_dflash.dflash_config()
    layer_keys = [key for key in flat if key not in ("architectures", "block_size", "dflash_config")]
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": kind,
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "somewhere"}},
        "transformer_layer_config": {key: flat[key] for key in layer_keys},
        "aux_hidden_state_layer_ids": TAPS,
        "mask_token_id": tiny_dflash.MASK,
        "block_size": 8,
        "draft_vocab_size": tiny.VOCAB,
        "target_hidden_size": None,
        "sliding_window_non_causal": False,
        **settings,
    }


Stored = tuple[dict[str, torch.Tensor], dict[str, Any]]


def dialects(tensors: dict[str, torch.Tensor]) -> dict[str, Stored]:
    """The same drafter as each community would publish it."""
    flat = tiny_dflash.dflash_config()
    bare = {key: value for key, value in flat.items() if key != "dflash_config"}
    ids = {"target_layer_ids": [tap - 1 for tap in TAPS], "mask_token_id": tiny_dflash.MASK}
    encoder = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    fused = {name: tensor for name, tensor in tensors.items() if not any(f"{p}_proj" in name for p in "qkv")}
    for number in range(2):
        name = f"layers.{number}.self_attn."
        fused[f"{name}qkv_proj.weight"] = torch.cat([tensors[f"{name}{part}_proj.weight"] for part in "qkv"])
    rope = {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    by_kind = {"rope_theta": None, "rope_parameters": {FULL: {"rope_type": "default", "rope_theta": 10000.0}}}
    return {
        "z-lab": (tensors, flat),
        "flat": (tensors, {**bare, **ids}),
        "model_prefix": ({f"model.{name}": tensor for name, tensor in tensors.items()}, flat),
        "fused": (fused, flat),
        "rope_parameters": (tensors, {**flat, **rope}),
        "rope_by_kind_of_layer": (tensors, {**flat, **by_kind}),
        "muse": (
            {encoder.get(name, name): tensor for name, tensor in tensors.items()},
            {**bare, **ids, "architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant"},
        ),
        "speculators": (tensors, speculators("dflash")),
    }


def dspark_dialects(tensors: dict[str, torch.Tensor]) -> dict[str, Stored]:
    flat, options = tiny_dflash.dflash_config(**tiny_dflash.DSPARK), dict(tiny_dflash.DSPARK)
    del options["architectures"]
    renamed = {f"logit_head.{name}" if "_head." in name else name: tensor for name, tensor in tensors.items()}
    return {
        "deepspec": (tensors, flat),
        "early": (renamed, {**flat, "dspark_block_size": 8}),
        "specforge": (tensors, {**tiny_dflash.dflash_config(**nested(**options), sample_from_anchor=True)}),
        "speculators": (tensors, speculators("dspark", **options, sample_from_anchor=True)),
    }


def dflash2_dialects(tensors: dict[str, torch.Tensor]) -> dict[str, Stored]:
    """As published, and as z-lab's class saves itself."""
    config = tiny_dflash.dflash_config(**nested(**tiny_dflash.DFLASH2), is_causal=False)
    saved = {f"{name}.weight" if name.endswith("codebook") else name: tensor for name, tensor in tensors.items()}
    return {"published": (tensors, config), "saved": (saved, config)}


DIALECTS = {
    "dflash": lambda: dialects(tiny_dflash.dflash_tensors()),
    "dspark": lambda: dspark_dialects(tiny_dflash.dflash_tensors(rank=12)),
    "dflash2": lambda: dflash2_dialects(tiny_dflash.dflash_tensors(conv=True, selector=True)),
}


@pytest.mark.parametrize("family", DIALECTS)
def test_every_dialect_is_the_same_drafter(family: str, target_path: Callable[..., Path], tmp_path: Path) -> None:
    traces = {}
    for name, (stored, config) in DIALECTS[family]().items():
        directory = tmp_path / name
        directory.mkdir()
        save_file({key: tensor.contiguous() for key, tensor in stored.items()}, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(config))
        with LLM(target_path("llama"), settings(directory), max_model_len=128) as llm:
            assert isinstance(llm.drafter, DFlash)
            assert llm.drafter.taps == tuple(TAPS)
            provenance = llm.drafter.provenance()
            assert "default" not in provenance["taps"].source
            assert provenance["mask_token_id"].value == tiny_dflash.MASK
            traces[name] = llm.generate([[3, 4, 5, 6]], replace(PARAMS, max_tokens=16))[0].outputs[0].trace
    assert all(trace == next(iter(traces.values())) for trace in traces.values()), traces.keys()


CONFLICTS: dict[str, tuple[dict[str, Any], str]] = {
    "taps given twice": ({"aux_hidden_state_layer_ids": [1, 2, 4]}, "twice and they differ"),
    "tap out of range": (nested(target_layer_ids=[0, 1, 8]), r"taps \[1, 2, 9\].*must ascend and lie in 0..4"),
    "taps out of order": (nested(target_layer_ids=[2, 1, 0]), "must ascend"),
    "default taps do not fit": (nested(target_layer_ids=None), "default, evenly spread"),
    "fc width": (nested(target_layer_ids=[0, 1]), "fc.weight takes 192 inputs"),
    "another target": ({"num_target_layers": 36}, "a target of 36 layers"),
    "target size": ({"target_hidden_size": 128}, "hidden size 128, this one has 64"),
    "no mask": ({"dflash_config": {"target_layer_ids": [0, 1, 2]}}, "must give the mask token's id"),
    "mask twice": ({"mask_token_id": 7}, "mask_token_id is given twice and differs: config.json mask_token_id says 7"),
    "mask unknown": (nested(mask_token_id=99999), "mask token 99999 has no embedding"),
    "causal twice": ({**nested(causal=True), "is_causal": False}, "is_causal is given twice and differs"),
    "causal contradicts": (
        {"layer_types": [SLIDING, FULL], "sliding_window": 4, "is_causal": True, "sliding_window_non_causal": True},
        "contradict each other",
    ),
    "no window": ({"layer_types": [SLIDING, FULL]}, "no sliding_window"),
    "layer types": ({"layer_types": [FULL]}, "layer_types must name 2 layers"),
    "unknown layer type": ({"layer_types": [FULL, "linear_attention"]}, "among them linear_attention"),
    "bias": ({"attention_bias": True}, "attention_bias says True, but the tensors say False"),
    "sinks": (nested(attention_sink_bias=True), "attention_sink_bias is True, but the tensors say False"),
    "no rope": ({"rope_theta": None}, "names no rope_theta"),
    "rope of one kind": (
        {"rope_theta": None, "rope_parameters": {SLIDING: {"rope_theta": 1e4}}},
        "says nothing of full_attention layers",
    ),
    "vocabulary without map": ({"draft_vocab_size": 100}, "no d2t tensor"),
    "softcap": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
    "latent attention": (nested(attention_mode="mla"), "attention_mode = 'mla' is not supported"),
    "shifted labels": (nested(shift_label=True), "shift_label = True is not supported"),
    "activation": ({"hidden_act": "relu"}, "hidden_act = 'relu' is not supported"),
    "missing tensor": ({"num_layers": 3}, r"lacks tensor layers.2.input_layernorm.weight"),
    "surplus tensor": ({"num_layers": 1}, r"nothing uses, tensor layers.1"),
    "misshapen": ({"intermediate_size": 100}, "gate_proj.weight"),
    "markov without tensors": ({"markov_rank": 4}, "lacks tensor markov_head.markov_w1.weight"),
    "markov head": ({"markov_rank": 4, "markov_head_type": "rnn"}, "markov_head_type = 'rnn'"),
    "confidence without tensors": ({"enable_confidence_head": True}, "no tensor confidence_head.proj.weight"),
    "conv groups": (nested(conv_kernel_size=2, conv_group_size=24), "conv_group_size 24 must divide"),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_what_contradicts_itself_is_refused(name: str, target_path: Callable[..., Path], tmp_path: Path) -> None:
    config, message = CONFLICTS[name]
    path = tiny_dflash.save_dflash(tmp_path / "drafter", tiny_dflash.dflash_tensors(), **config)
    with pytest.raises(ValueError, match=message):
        LLM(target_path("llama"), {"method": "dflash", "model": str(path)}, max_model_len=64)


DOMINO: dict[str, dict[str, Any]] = {
    "projector": nested(projector_type="domino", shift_label=True),
    "architecture": {"architectures": ["DominoDraftModel"]},
    "model_type": {"architectures": None, "model_type": "domino"},
    "tensors": {},
}


@pytest.mark.parametrize("mark", DOMINO)
def test_domino_is_refused_by_name(mark: str, target_path: Callable[..., Path], tmp_path: Path) -> None:
    """Whoever reads the message must not look for a mistake in the file, also where the method is not named."""
    tensors = tiny_dflash.dflash_tensors() | (
        {"prefix_gru.weight_ih_l0": torch.zeros(3, 3)} if mark == "tensors" else {}
    )
    path = tiny_dflash.save_dflash(tmp_path, tensors, **DOMINO[mark])
    with pytest.raises(ValueError, match=r"Domino drafters are not supported.*GRU"):
        LLM(target_path("llama"), {"model": str(path)}, max_model_len=64)


def test_recurrent_markov_heads_are_refused_by_name(target_path: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny_dflash.save_dflash(
        tmp_path, tiny_dflash.dflash_tensors(rank=12), **tiny_dflash.DSPARK, markov_head_type="rnn"
    )
    with pytest.raises(ValueError, match=r"markov_head_type = 'rnn' is not supported \(supported: vanilla, gated\)"):
        LLM(target_path("llama"), {"model": str(path)}, max_model_len=64)


def test_other_refusals(target_path: Callable[..., Path], tmp_path: Path) -> None:
    def refused(message: str, path: Path, **settings: Any) -> None:
        with pytest.raises(ValueError, match=message):
            LLM(target_path("llama"), {"method": "dflash", "model": str(path), **settings}, max_model_len=64)

    path = tiny_dflash.save_dflash(tmp_path / "block")
    refused("trained with blocks of 8: ask for at most 8", path, num_speculative_tokens=9)
    (path / "mask_embedding.pt").write_bytes(b"a pickle")
    refused("mask_embedding.pt, a pickle", path)
    path = tmp_path / "dspark"
    tiny_dflash.save_dspark(path)
    (path / "config.json").write_text(json.dumps(speculators("dspark", markov_rank=12)))
    refused("does not say sample_from_anchor", path)
    tensors = tiny_dflash.dflash_tensors(draft_vocab=96)
    tensors["d2t"] = tensors["d2t"] + torch.arange(96)
    refused("must hold offsets", tiny_dflash.save_dflash(tmp_path / "ids", tensors, draft_vocab_size=96))


def test_taps_can_be_overridden(target_path: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny_dflash.save_dflash(tmp_path, num_target_layers=36)
    with LLM(target_path("llama"), {**settings(path), "taps": [0, 2, 4]}, max_model_len=64) as llm:
        assert llm.drafter is not None
        assert llm.drafter.taps == (0, 2, 4)
        assert llm.drafter.provenance()["taps"].source == "speculative_config taps"


# reading: the option that it reads otherwise, and how the reference reads it then
READINGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "sample_from_anchor true": ("plain", {"from_anchor": True}, "sample_from_anchor true"),
    "windows both ways": ("sliding_is_causal", {"causal": (False, False)}, '"sliding_window_non_causal": true'),
    "windows causal": ("all_sliding", {"causal": (True, True)}, '"sliding_window_non_causal": false'),
    "windows from the anchor": ("sliding_both_ways", {"anchored": True}, '"window_from_anchor": true'),
    "windows from every row": ("anchored", {"anchored": False}, '"window_from_anchor": false'),
    "no windows": ("sliding_is_causal", {"windows": (0, 0), "causal": (False, False)}, "layer_types to full_attention"),
    "last tap after the final norm": ("last_tap", {}, '"tap_after_final_norm": true'),
}


@pytest.mark.parametrize("name", READINGS)
def test_other_readings_share_the_weights(name: str, target_path: Callable[..., Path], tmp_path: Path) -> None:
    option, changes, advice = READINGS[name]
    if option == "last_tap":
        path, drafter = make(tmp_path, "plain")
        tiny_dflash.save_dflash(path, drafter.tensors, **nested(target_layer_ids=[0, 1, 3]))
    else:
        path, drafter = make(tmp_path, option)
    weights = tiny.reference("llama")
    embed, lm_head = weights.model.embed_tokens.weight.detach(), weights.lm_head.weight.detach()
    with LLM(target_path("llama"), settings(path), **SMALL) as llm:
        own = llm.drafter
        assert isinstance(own, DFlash)
        before = llm.generate([PROMPTS[0]], PARAMS)[0].outputs[0].trace
        other = next(reading for reading in own.readings() if reading.name == name).apply(own)
        assert {id(each) for each in other.parameters()} == {id(each) for each in own.parameters()}
        with llm.engine.drafting_with(FixedDepth(other.lookahead), other):
            output = llm.generate([PROMPTS[2]], PARAMS)[0].outputs[0]  # nothing of it was read before
        assert llm.generate([PROMPTS[0]], PARAMS)[0].outputs[0].trace == before
        assert advice in next(reading.advice for reading in own.readings() if reading.name == name)
        assert name not in {reading.name for reading in other.readings()}, "it is what it says"
    text, length = PROMPTS[2] + output.token_ids, len(PROMPTS[2]) + 1
    streams, same = target_streams(text, [1, 2, 4] if option == "last_tap" else TAPS), True
    for entry in (output.trace or [])[:20]:
        given = text[length - 1], streams[: length - 1], embed, lm_head, 4
        assert entry["draft"] == slow.draft(replace(drafter, **changes), *given)[0]
        same = same and entry["draft"] == slow.draft(drafter, *given)[0]
        length += entry["accepted"] + 1
    assert same == (not changes)


def test_which_readings_there_are(target_path: Callable[..., Path], tmp_path: Path) -> None:
    path, _ = make(tmp_path, "plain")
    with LLM(target_path("llama"), settings(path), **SMALL) as llm:
        assert llm.drafter is not None
        readings = {reading.name: reading for reading in llm.drafter.readings()}
        assert readings.keys() == {"taps +1", "taps -1", "sample_from_anchor true"}
        assert readings["taps -1"].apply(llm.drafter).taps == (0, 1, 2)


def test_speculators_trainers_count_windows_from_the_anchor(target_path: Callable[..., Path], tmp_path: Path) -> None:
    flat = speculators("dflash")
    layer = {**flat["transformer_layer_config"], "layer_types": [SLIDING, FULL], "sliding_window": 6}
    path = tiny_dflash.save_dflash(tmp_path)
    (path / "config.json").write_text(json.dumps({**flat, "transformer_layer_config": layer}))
    with LLM(target_path("llama"), settings(path), **SMALL) as llm:
        assert isinstance(llm.drafter, DFlash)
        assert llm.drafter.config.masks == (LayerMask(6, causal=True, anchored=True), LayerMask(0, causal=False))
        assert "speculators" in llm.drafter.provenance()["window_from_anchor"].source
