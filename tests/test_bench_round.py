"""`outrider bench round`: random weights, made-up acceptance, and figures that add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from outrider.bench import random_pair
from outrider.cli import app

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
    methods = [part for method in ("eagle3", "dflash", "mtp") for part in ("--method", method)]
    found = run("--shape", shape, *methods, "-k", "5", "--accept-length", str(length), "--batch-size", "3", "--json")
    assert found["acceptance"].startswith("synthetic")
    assert [side["name"] for side in found["sides"]] == ["plain", "eagle3", "dflash", "mtp"]
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
