"""EAGLE-3 against the slow reference, for every option, over generations with accepted and rejected drafts."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import eagle3_reference as slow
import pytest
import tiny
import torch
from rounds import Expected, check_logits, check_rounds, generate

from outrider import LLM, SamplingParams
from outrider.drafters.eagle3 import Eagle3
from outrider.engine.drafting import Drafting
from outrider.engine.engine import Engine
from outrider.kernels.chain import NativeChain
from outrider.layers.cached import cached_layers

TAPS = [1, 2, 4]
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
# name: (options of the tensors, keys of config.json, number of taps, hidden size, draft vocabulary)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reduced_vocabulary": {"draft_vocab": 96},
    "fc_norm": {"fc_norm": True, "norm_output": True},
    "norm_before_fc": {"norm_before_fc": True},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_output": {"norm_output": True},
    "head_without_norm": {"norm_output": False, "norm_before_head": False},
    "two_layers": {"num_layers": 2},
    "own_embedding_other_size": {"own_embedding": True, "hidden": 32},
    "shared_head": {"own_head": False},
    "one_tap": {"taps": [3]},
    "five_taps_with_embedding": {"taps": [0, 1, 2, 3, 4]},
    "qwen3_norms_and_biases": {"head_norm": True, "attention_bias": True},
    "logit_scale": {"logit_scale": 0.5, "draft_vocab": 128},
    "last_hidden_alone": {"use_aux_hidden_state": False, "taps": [4]},
    "last_hidden_alone_with_a_projection": {"use_aux_hidden_state": False, "taps": [4], "keeps_fc": True},
    "latent": {"latent": True, "config": tiny.LATENT},
    "latent_two_layers": {"latent": True, "num_layers": 2, "fc_norm": True, "config": tiny.LATENT},
    "windows": {"num_layers": 2, "head_norm": True, "config": WINDOWS},
    "all_biases": {"attention_bias": True, "mlp_bias": True, "fc_bias": True, "config": {"bias": True}},
    "tied": {"own_head": False, "own_embedding": True, "config": {"tie_word_embeddings": True}},
    "absolute_ids": {"draft_vocab": 96, "absolute": True},
}


def make(directory: Path, options: dict[str, Any]) -> tuple[Path, slow.Head]:
    hidden, draft_vocab = options.get("hidden", 64), options.get("draft_vocab", tiny.VOCAB)
    taps = options.get("taps", TAPS)
    extras = {key: value for key, value in options.items() if key not in ("hidden", "draft_vocab", "config")}
    tensors = tiny.eagle3_tensors(hidden, 64, len(taps), draft_vocab, **extras)
    stored = dict(tensors)
    if options.get("use_aux_hidden_state") is False and not options.get("keeps_fc"):
        del stored["fc.weight"]
    if options.get("absolute"):
        stored["d2t"] = tensors["d2t"] + torch.arange(draft_vocab)
    flags = ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual", "logit_scale", "norm_before_head")
    others = ("use_aux_hidden_state", "attention_bias", "mlp_bias")
    config = {key: options[key] for key in (*flags, *others) if key in options}
    path = tiny.save_eagle3(
        directory,
        stored,
        hidden=hidden,
        draft_vocab=draft_vocab,
        num_hidden_layers=options.get("num_layers", 1),
        eagle_aux_hidden_state_layer_ids=taps,
        target_hidden_size=64,
        **{**config, **options.get("config", {})},
    )
    head = slow.Head(tensors, num_layers=options.get("num_layers", 1), use_taps="use_aux_hidden_state" not in options)
    settings = {key: options[key] for key in flags if key in options}
    return path, replace(head, **settings, windows=(5, 0) if name_of(options) == "windows" else ())


def name_of(options: dict[str, Any]) -> str:
    return next(name for name, each in OPTIONS.items() if each is options)


def reference(head: slow.Head, taps: list[int]) -> Expected:
    weights = tiny.reference("llama")
    embed = head.tensors.get("embed_tokens.weight", weights.model.embed_tokens.weight.detach())
    tied = embed if embed.shape[1] == 64 and "embed_tokens.weight" in head.tensors else weights.lm_head.weight.detach()
    lm_head = head.tensors.get("lm_head.weight", tied)

    def expected(text: list[int], count: int) -> tuple[list[int], list[torch.Tensor]]:
        streams = slow.target_streams("llama", text[:-1], taps, post_norm=not head.use_taps)
        return slow.draft(head, text, streams, embed, lm_head, count)

    return expected


@pytest.mark.parametrize("name", OPTIONS)
def test_drafts_equal_the_slow_reference(name: str, target_path: Callable[..., Path], tmp_path: Path) -> None:
    options = OPTIONS[name]
    path, head = make(tmp_path / "head", options)
    settings, expected = {"method": "eagle3", "model": str(path)}, reference(head, options.get("taps", TAPS))
    # one of them passes the head's max_position_embeddings of 64
    check_rounds(target_path("llama"), settings, expected, max_tokens=80 if name == "plain" else 44)
    if name in ("plain", "latent", "windows", "two_layers"):
        check_logits(target_path("llama"), settings, expected)


def dialects(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]]:
    """The same head as each community would publish it."""
    flat = tiny.eagle3_config(draft_vocab=96, fc_norm=True, norm_output=True)
    del flat["eagle_aux_hidden_state_layer_ids"]
    layer_keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps")
    layer = {key: flat[key] for key in (*layer_keys, "num_key_value_heads", "rope_theta", "vocab_size")}
    midlayer = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    aux = ["aux_norm_low", "aux_norm_mid", "aux_norm_high"]
    old_norms = {
        name.replace("fc_norm.", "") if "fc_norm" not in name else f"{aux[int(name.split('.')[1])]}.weight": tensor
        for name, tensor in midlayer.items()
    }
    return {
        "yuhuili": (midlayer, {**flat, "eagle_aux_hidden_state_layer_ids": TAPS}),
        "with_llama_architecture": (
            midlayer,
            {**flat, "architectures": ["LlamaForCausalLM"], "eagle_aux_hidden_state_layer_ids": TAPS},
        ),
        "model_prefix": (
            {name if name in ("d2t", "t2d", "lm_head.weight") else f"model.{name}": t for name, t in tensors.items()},
            {**flat, "eagle_aux_hidden_state_layer_ids": TAPS},
        ),
        "sglang_aux_norm": (
            old_norms,
            {k: v for k, v in flat.items() if k != "fc_norm"}
            | {"use_aux_norm": True, "eagle_aux_hidden_state_layer_ids": TAPS},
        ),
        "modelopt": (
            tensors,
            {**flat, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in TAPS]}},
        ),
        "modelopt_numbered": (
            {name.replace("layers.0.", "midlayer.0."): tensor for name, tensor in tensors.items()},
            {**flat, "eagle_config": {"layer_ids": TAPS, "use_aux_hidden_state": True}},
        ),
        "deepspec": (
            tensors,
            {**flat, "architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [tap - 1 for tap in TAPS]},
        ),
        "speculators": (
            tensors,
            {
                "architectures": ["Eagle3DraftModel"],
                "speculators_model_type": "eagle3",
                "transformer_layer_config": {"model_type": "llama", **layer},
                "draft_vocab_size": 96,
                "norm_before_residual": False,
                "fc_norm": True,
                "norm_output": True,
                "eagle_aux_hidden_state_layer_ids": TAPS,
            },
        ),
    }


def test_every_dialect_is_the_same_head(target_path: Callable[..., Path], tmp_path: Path) -> None:
    tensors = tiny.eagle3_tensors(64, 64, 3, 96, fc_norm=True)
    traces = {}
    for name, (stored, config) in dialects(tensors).items():
        directory = tiny.save_head(tmp_path / name, stored, config)
        with LLM(target_path("llama"), {"model": str(directory)}, max_model_len=128) as llm:
            assert llm.drafter is not None
            assert llm.drafter.taps == tuple(TAPS)
            assert llm.drafter.provenance()["taps"].source != "default"
            params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, trace=True)
            traces[name] = llm.generate([[3, 4, 5, 6]], params)[0].outputs[0].trace
    assert all(trace == traces["yuhuili"] for trace in traces.values()), traces.keys()


CONFLICTS = {
    "taps given twice": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, "eagle_aux_hidden_state_layer_ids": TAPS},
        "twice and they differ",
    ),
    "taps in two dialects": ({"target_layer_ids": [0, 1, 2]}, "twice and they differ"),
    "tap out of range": ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, r"taps \[1, 2, 9\]"),
    "tap count": ({"num_aux_hidden_states": 4}, "num_aux_hidden_states is 4"),
    "fc width": ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "fc.weight takes 192 inputs"),
    "both norms": ({"fc_norm": True, "norm_before_fc": True}, "exclude each other"),
    "flag differs": ({"norm_before_fc": True, "eagle_config": {"norm_before_fc": False}}, "given twice and differs"),
    "target size": ({"target_hidden_size": 128}, "hidden size 128, this one has 64"),
    "bias": ({"attention_bias": True}, "attention_bias says True, but the tensors say False"),
    "vocabulary without map": ({"draft_vocab_size": 100}, "no d2t tensor"),
    "missing norm": ({"fc_norm": True}, "lacks tensor fc_norm.0.weight"),
    "misshapen": ({"intermediate_size": 100}, "gate_proj.weight"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    "window without a length": ({"layer_types": ["sliding_attention"]}, "no sliding_window"),
    "too few layer types": ({"layer_types": [], "num_hidden_layers": 2}, r"lacks tensor layers\.1\."),
    "unknown layer type": ({"layer_types": ["chunked_attention"]}, "layer_types .'chunked_attention'. must say"),
    "every layer fused": (
        {"num_hidden_layers": 2, "eagle_config": {"next_layer_regular": False}},
        "next_layer_regular = False is not supported",
    ),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_what_contradicts_itself_is_refused(name: str, target_path: Callable[..., Path], tmp_path: Path) -> None:
    config, message = CONFLICTS[name]
    path = tiny.save_eagle3(tmp_path / "head", tiny.eagle3_tensors(64, 64, 3, tiny.VOCAB), **config)
    with pytest.raises(ValueError, match=message):
        LLM(target_path("llama"), {"method": "eagle3", "model": str(path)}, max_model_len=64)


def test_target_ids_that_can_be_neither_are_refused(target_path: Callable[..., Path], tmp_path: Path) -> None:
    tensors = tiny.eagle3_tensors(64, 64, 3, 96)
    tensors["d2t"] = tensors["d2t"] + 200
    path = tiny.save_eagle3(tmp_path / "head", tensors, draft_vocab=96)
    with pytest.raises(ValueError, match="outside the target's vocabulary of 256, and does not hold"):
        LLM(target_path("llama"), {"model": str(path)}, max_model_len=64)


# what is said, and whether it must be told as doubtful; the target has 12 layers, so the usual taps are 2, 6, 9
IDS: dict[str, tuple[dict[str, Any], tuple[int, ...], str]] = {
    "nothing": ({}, (2, 6, 9), "default"),
    "top level": ({"eagle_aux_hidden_state_layer_ids": [2, 6, 9]}, (2, 6, 9), "layers done"),
    "top level, lifted": ({"eagle_aux_hidden_state_layer_ids": [1, 5, 8]}, (1, 5, 8), "doubtful.*2, 6, 9"),
    "top level, odd": ({"eagle_aux_hidden_state_layer_ids": [3, 7, 10]}, (3, 7, 10), "ambiguous.*4, 8, 11"),
    "nested": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 8]}}, (2, 6, 9), r"outputs \(\+1\)$"),
    "nested, as taps": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 6, 9]}}, (3, 7, 10), "doubtful"),
    "deepspec": ({"target_layer_ids": [1, 5, 8]}, (2, 6, 9), r"outputs \(\+1\)$"),
    "deepspec, other layers": ({"target_layer_ids": [3, 7, 11]}, (4, 8, 12), r"outputs \(\+1\)$"),
    "nested layer_ids": ({"eagle_config": {"layer_ids": [9, 6, 2]}}, (2, 6, 9), "layers done$"),
}


@pytest.mark.parametrize("name", IDS)
def test_layer_ids_and_their_doubts(name: str, target_path: Callable[..., Path], tmp_path: Path) -> None:
    said, taps, source = IDS[name]
    config = {key: value for key, value in tiny.eagle3_config().items() if key != "eagle_aux_hidden_state_layer_ids"}
    path = tiny.save_head(tmp_path, tiny.eagle3_tensors(64, 64, 3, tiny.VOCAB), {**config, **said})
    with LLM(target_path("llama", num_hidden_layers=12), {"model": str(path)}, max_model_len=64) as llm:
        assert llm.drafter is not None
        found = llm.drafter.provenance()["taps"]
    assert found.value == taps
    assert re.search(source, found.source), found.source
    assert any(word in found.source for word in ("doubtful", "ambiguous")) == any(
        word in source for word in ("doubtful", "ambiguous")
    )


def test_every_setting_says_where_it_was_read(target_path: Callable[..., Path], tmp_path: Path) -> None:
    flat = tiny.eagle3_config(sliding_window=8)
    del flat["rope_theta"]
    layer = {key: value for key, value in flat.items() if key not in ("architectures", "draft_vocab_size")}
    config = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "draft_vocab_size": tiny.VOCAB,
        "eagle_aux_hidden_state_layer_ids": TAPS,
    }
    path = tiny.save_head(tmp_path, tiny.eagle3_tensors(64, 64, 3, tiny.VOCAB), config)
    with LLM(target_path("llama"), {"model": str(path)}, max_model_len=64) as llm:
        assert llm.drafter is not None
        said = llm.drafter.provenance()
    assert said["rope"].value == {"rope_theta": 10000.0}, "heads are trained so, whatever the target's is"
    assert said["rope"].source == "default"
    assert said["norm_before_residual"].value is True
    assert said["norm_before_residual"].source.endswith("ambiguous")
    assert "sliding_window=8 is not heeded" in said["windows"].source
    assert (said["own_head"].value, said["own_head"].source) == (True, "tensors")


SAID: dict[str, tuple[dict[str, Any], dict[str, bool]]] = {
    "nothing": ({}, {"norm_output": True}),
    "true": ({"norm_output": True}, {"norm_output": False}),
    "false": ({"norm_output": False}, {"norm_output": True, "norm_before_head": False}),
}


@pytest.mark.parametrize("name", SAID)
def test_norm_output_is_tried_as_each_trainer_means_it(
    name: str, target_path: Callable[..., Path], tmp_path: Path
) -> None:
    """As it is read, the head reads normed states, and norm_output says whether they are fed back."""
    said, others = SAID[name]
    path = tiny.save_head(tmp_path, tiny.eagle3_tensors(64, 64, 3, tiny.VOCAB), {**tiny.eagle3_config(), **said})
    with LLM(target_path("llama"), {"model": str(path), "force": True}, max_model_len=64) as llm:
        assert isinstance(llm.drafter, Eagle3)
        found = llm.drafter.config
        readings = {reading.name: reading for reading in llm.drafter.readings() if "norm_before_r" not in reading.name}
        for flag, value in others.items():
            reading = readings[f"{flag} {str(value).lower()}"]
            assert f'"{flag}": {str(value).lower()}' in reading.advice
            other = reading.apply(llm.drafter)
            assert isinstance(other, Eagle3)
            assert other.network.config == replace(found, **{flag: value})  # type: ignore[arg-type]
    assert (found.norm_output, found.norm_before_head) == (said.get("norm_output", False), True)
    assert {name.split()[0] for name in readings} - {"taps"} == others.keys()
    assert ("SpecForge" in found.provenance["norm_output"].source) == bool(said)


# a reading: what says the same in config.json, and in speculative_config
READINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "taps -1": ({}, {"taps": [0, 1, 3]}),
    "norm_before_residual true": ({"norm_before_residual": True}, {}),
    "norm_output true": ({"norm_output": True}, {}),
}


def test_readings_are_what_other_checkpoints_would_say(target_path: Callable[..., Path], tmp_path: Path) -> None:
    """A reading of a loaded drafter drafts like a checkpoint that says so, and leaves the drafter as it was."""
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, trace=True)
    small: dict[str, Any] = {"max_model_len": 128, "page_size": 4}
    traces = {}
    for name, (config, settings) in {"": ({}, {}), **READINGS}.items():
        path = tiny.save_eagle3(tmp_path / f"head{name}", draft_vocab=96, **config)
        with LLM(target_path("llama"), {"model": str(path), **settings}, **small) as llm:
            traces[name] = llm.generate([[3, 4, 5, 6]], params)[0].outputs[0].trace
    assert len({str(trace) for trace in traces.values()}) == len(traces)
    path = tmp_path / "head"
    with LLM(target_path("llama"), {"model": str(path)}, **small) as llm:
        own = llm.drafter
        assert own is not None
        readings = {reading.name: reading for reading in own.readings()}
        assert list(readings) == list(READINGS), "taps +1 leaves the target, and d2t cannot be ids"
        for name in [*READINGS, ""]:
            drafter = readings[name].apply(own) if name else own
            llm.engine.close()
            engine = Engine(llm.config, llm.target, Drafting.of(llm.config, drafter), llm.budget, llm.tokenizer)
            (request,) = llm.requests_for([3, 4, 5, 6], params, 0)
            engine.add(request)
            while engine.has_work:
                engine.step()
            assert request.trace == traces[name], name


def test_a_reading_of_the_draft_ids(target_path: Callable[..., Path], tmp_path: Path) -> None:
    """Offsets that all differ, and are not too large, could be ids too: this is told, and can be tried."""
    tensors = tiny.eagle3_tensors(64, 64, 3, 64, own_head=True)
    tensors["d2t"] = torch.arange(64) + 20  # ids 20, 22, ... as offsets
    path = tiny.save_eagle3(tmp_path, tensors, draft_vocab=64)
    with LLM(target_path("llama"), {"model": str(path)}, max_model_len=64) as llm:
        assert isinstance(llm.drafter, Eagle3)
        assert llm.drafter.provenance()["target_ids"].source.endswith("could be the target's ids")
        other = next(reading for reading in llm.drafter.readings() if reading.name == "d2t absolute")
        reread = other.apply(llm.drafter)
        assert isinstance(reread, Eagle3)
        ids = [drafter.target_ids() for drafter in (llm.drafter, reread)]
    assert [list(each[:3]) for each in ids if each is not None] == [[20, 22, 24], [20, 21, 22]]


def test_surplus_tensor_is_refused(target_path: Callable[..., Path], tmp_path: Path) -> None:
    tensors = tiny.eagle3_tensors(64, 64, 3, tiny.VOCAB) | {"mystery.weight": torch.zeros(3)}
    path = tiny.save_eagle3(tmp_path / "head", tensors)
    with pytest.raises(ValueError, match=r"mystery\.weight"):
        LLM(target_path("llama"), {"model": str(path)}, max_model_len=64)


@pytest.mark.parametrize("layers", [1, 2])
def test_following_remembers_what_drafting_would(layers: int, target_path: Callable[..., Path], tmp_path: Path) -> None:
    """Without drafts to make, the last layer stops at its keys and values."""
    head = tiny.save_eagle3(
        tmp_path / "head", tiny.eagle3_tensors(64, 64, 3, tiny.VOCAB, num_layers=layers), num_hidden_layers=layers
    )
    found = []
    for shortened in (True, False):
        settings = {"model": str(head), "force": True, "num_speculative_tokens": 3}
        with LLM(target_path(), settings, max_model_len=64, max_num_seqs=2, max_num_batched_tokens=16) as llm:
            assert isinstance(llm.drafter, Eagle3)
            network = llm.drafter.network
            if not shortened:
                network.follow = network.forward  # type: ignore[method-assign]
            params = SamplingParams(max_tokens=1, temperature=0)
            llm.generate([list(range(5, 53))], params)  # three parts, the last one with a draft
            pages = [page for layer in cached_layers(network) for page in layer.pages or ()]
            found.append([page[1:].clone() for page in pages])  # the first one is a dump
    assert len(found[0]) == 2 * layers
    assert all(map(torch.equal, *found))
    assert all(page.any() for page in found[0])


@pytest.mark.parametrize("name", ["plain", "norm_output", "absolute_ids", "logit_scale"])
def test_one_native_call_drafts_what_single_steps_draft(
    name: str, target_path: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests at different places; the bits of a state decide where tokens are close."""
    path, _ = make(tmp_path / "head", OPTIONS[name])
    settings = {"method": "eagle3", "model": str(path)}
    calls: list[int] = []
    run = NativeChain.__call__
    monkeypatch.setattr(NativeChain, "__call__", lambda self, *given: calls.append(len(given[0])) or run(self, *given))
    native = [each.trace for each in generate(target_path("llama"), settings)]
    assert len(calls) > 20
    assert set(calls) == {3}
    monkeypatch.setattr(Eagle3, "native_chain", lambda self, drawn: None)
    assert [each.trace for each in generate(target_path("llama"), settings)] == native


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.8}, {"top_k": 7, "min_p": 0.05}])
@pytest.mark.parametrize("name", ["plain", "norm_output", "absolute_ids", "reduced_vocabulary", "logit_scale"])
def test_one_native_call_draws_what_single_steps_draw(
    name: str,
    filters: dict[str, Any],
    target_path: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A greedy request, and two that draw; where logits are scaled, they are drawn step by step."""
    path, _ = make(tmp_path / "head", OPTIONS[name])
    settings = {"method": "eagle3", "model": str(path), "num_speculative_tokens": 3, "force": True}
    params = [SamplingParams(temperature=heat, seed=number, max_tokens=24, ignore_eos=True, trace=True, **filters)
              for number, heat in enumerate((0.0, 0.7, 1.3))]  # fmt: skip
    calls: list[bool] = []
    run = NativeChain.__call__

    def noted(self: NativeChain, *given: Any) -> None:
        calls.append(given[-1] is not None)
        run(self, *given)

    def traces() -> list[Any]:
        with LLM(target_path("llama"), settings, max_model_len=64) as llm:
            return [each.outputs[0].trace for each in llm.generate([[3, 4, 5], [9, 8], [7, 7, 7, 1]], params)]

    monkeypatch.setattr(NativeChain, "__call__", noted)
    native = traces()
    assert (sum(calls) > 15) == (name != "logit_scale")
    monkeypatch.setattr(Eagle3, "native_chain", lambda self, drawn: None)
    assert traces() == native
