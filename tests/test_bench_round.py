"""`outrider bench round`: random weights, made-up acceptance, and figures that add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from outrider.bench import random_pair
from outrider.bench.round import pass_bytes
from outrider.bench.shapes import SHAPES
from outrider.cli import app
from outrider.config import EngineConfig
from outrider.layers.packing import mixtures

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}


@pytest.fixture
def shape(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPE))
    return str(path)


def run(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(
        app, ["bench", "round", "--num-rounds", "2", "--context", "9", "--device", "cpu", *arguments]
    )
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("length", [1.0, 2.5, 4.0])
def test_acceptance_is_what_was_asked_for(length: float, shape: str) -> None:
    methods = [part for method in ("eagle3", "p_eagle", "dflash", "mtp") for part in ("--method", method)]
    found = run("--shape", shape, *methods, "-k", "5", "--accept-length", str(length), "--batch-size", "3", "--json")
    assert found["acceptance"].startswith("synthetic")
    assert [side["name"] for side in found["sides"]] == ["plain", "eagle3", "p_eagle", "dflash", "mtp"]
    for side in found["sides"][1:]:
        assert side["synthetic_accept_length"] == pytest.approx(length, abs=0.35)
        speed_up = side["tokens_per_second"] / found["sides"][0]["tokens_per_second"]
        assert side["speed_up"] == pytest.approx(speed_up, rel=0.02)
        assert side["efficiency"] == pytest.approx(speed_up / side["synthetic_accept_length"], rel=0.02)
    assert found["sides"][0]["synthetic_accept_length"] == 1


def test_bytes_are_those_of_the_weights(shape: str) -> None:
    plain = run("--shape", shape, "--json")["sides"][0]
    target = random_pair.LlamaWithModules(SHAPE)
    weights = sum(p.numel() * 4 for name, p in target.named_parameters() if name != "embed.weight")
    assert plain["gigabytes"] * 1e9 == pytest.approx(weights, abs=1e6)


def test_peers_are_compared(shape: str) -> None:
    names = ["transformers", "transformers-compiled", "transformers-continuous"]
    given = [part for name in names for part in ("--against", name)]
    found = run("--shape", shape, *given, "--batch-size", "2", "--num-tokens", "6")
    assert [peer["name"] for peer in found["peers"]] == names
    for peer in found["peers"]:
        ours = 2e3 / found["sides"][0]["round_ms"]
        assert peer["outrider_plain_is_times"] == pytest.approx(ours / peer["tokens_per_second"], rel=0.02)
        whole = peer["outrider_plain_tokens_per_second_with_prompts"] / peer["tokens_per_second_with_prompts"]
        assert peer["outrider_plain_with_prompts_is_times"] == pytest.approx(whole, rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "nothing"], "no config.json and none of the known shapes"),
        (["--method", "suffix"], "no random drafter of method 'suffix'"),
        (["--against", "somebody"], "--against does not know somebody"),
    ],
)
def test_mistakes_are_named_before_anything_is_measured(
    arguments: list[str], message: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_pair, "fill", lambda module: pytest.fail("weights are being made"))
    given = arguments if "--shape" in arguments else ["--shape", shape, *arguments]
    result = CliRunner().invoke(
        app, ["bench", "round", "--num-rounds", "1", "--context", "3", "--device", "cpu", *given]
    )
    assert result.exit_code != 0
    assert message in " ".join((result.output + str(result.exception)).split())


def test_random_drafters_are_filled() -> None:
    target = random_pair.LlamaWithModules(SHAPE)
    random_pair.fill(target)
    assert all(bool(torch.isfinite(p).all()) for p in target.parameters())
    assert bool((target.norm.weight == 1).all())


MIXTURE = {
    **{key: SHAPES["gpt-oss-20b"][key] for key in ("architectures", "rope_scaling", "quantization_config")},
    **{key: value for key, value in SHAPE.items() if key != "architectures"},
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "hidden_size": 128,
    "intermediate_size": 128,
    "head_dim": 16,
    "sliding_window": 8,
    "attention_bias": True,
}


def test_a_mixture_with_biases_has_a_random_head(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MIXTURE))
    found = run("--shape", str(path), "--method", "eagle3", "-k", "2", "--accept-length", "2", "--json")
    assert [side["name"] for side in found["sides"]] == ["plain", "eagle3"]
    assert found["sides"][1]["synthetic_accept_length"] == pytest.approx(2, abs=0.35)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_experts_of_four_bits_are_counted_so(quantization: str | None) -> None:
    """Groups of 32 have a byte each. What is in few bits is not rounded again."""
    config = EngineConfig(
        "random", dtype="float32", device="cpu", max_model_len=32, max_num_seqs=1, quantization=quantization
    )
    engine = random_pair.random_engine(config, MIXTURE)
    try:
        numbers = 4 * 3 * 128 * 128 * 4.25 / 8
        routed = mixtures(engine.target)
        assert [sum(form.num_bytes for form in each.packed.values()) for each in routed] == [numbers] * 8
        read, all_read = (pass_bytes(engine, num_rows) for num_rows in (1, 1000))
        assert all_read - read == pytest.approx(8 * numbers / 2, abs=2)
    finally:
        engine.close()
