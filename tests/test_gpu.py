"""The same engine on a CUDA device: plain = speculative there too, and equal to the CPU's tokens in float32."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_models import mxfp4_model
from samples import METHODS, drafter_settings, sample_target, suits
from tiny import FAMILIES

from outrider import LLM, SamplingParams
from outrider.kernels.gpu.hopper import on_hopper

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
PARAMS = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8, 9] * 3, [40, 41], list(range(60, 90))]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", METHODS)
def test_speculation_on_a_gpu(
    method: str, temperature: float, target_path: Callable[..., Path], tmp_path: Path
) -> None:
    params = replace(PARAMS, temperature=temperature, seed=3)
    family = "qwen3" if suits(method, "qwen3") else next(each for each in FAMILIES if suits(method, each))
    path, tokens = sample_target(method, tmp_path, target_path, family), []
    settings = drafter_settings(method, tmp_path, target_path, family)
    for device, config in (("cpu", None), ("cuda", None), ("cuda", settings)):
        with LLM(path, config, device=device, dtype="float32", max_model_len=128) as llm:
            tokens.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)])
    assert tokens[0] == tokens[1] == tokens[2]


def test_bfloat16_on_a_gpu(target_path: Callable[..., Path], tmp_path: Path) -> None:
    settings = drafter_settings("eagle3", tmp_path, target_path, "llama")
    with LLM(target_path("llama"), settings, device="cuda", dtype="bfloat16", max_model_len=128) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
    assert all(len(output.outputs[0].token_ids) == 24 for output in outputs)


def test_embedded_pair_on_a_gpu() -> None:
    """With the check at load, which no other test here makes: their drafters are random."""
    found = []
    for device in ("cpu", "cuda"):
        with LLM(device=device, dtype="float32", max_model_len=256) as llm:
            assert llm.checkup is not None
            assert not llm.checkup.is_dead
            output = llm.generate("Once upon a time", PARAMS)[0].outputs[0]
            found.append(output.token_ids)
    assert found[0] == found[1]


def distance(rows: list[dict[int, float]], wanted: list[dict[int, float]]) -> float:
    """Root mean square of what log-probabilities of the same tokens differ by."""
    pairs = [(row[id], other[id]) for row, other in zip(rows, wanted, strict=True) for id in row.keys() & other.keys()]
    assert len(pairs) >= 2 * len(rows)
    return float((torch.tensor(pairs).diff(dim=1) ** 2).mean() ** 0.5)


def rows_multiplied(
    path: Path, module_name: str, name: str, monkeypatch: pytest.MonkeyPatch, prompts: list[list[int]] = PROMPTS
) -> set[int] | None:
    """How many rows at a time a kernel for few rows is given, which strays as far from what float32 says as what exact
    mode does, which does not take it; None: this device has no such kernel. Everybody says the same token, so that
    drafts stand, and log-probabilities can be compared."""
    used = set()
    if module := on_hopper(module_name, torch.device("cuda")):
        original = getattr(module, name)

        def spy(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            used.add(len(x))
            return original(x, *args, **options)

        monkeypatch.setattr(module, name, spy)
    params = replace(PARAMS, allowed_token_ids=[7], logprobs=5)
    ngram = {"method": "ngram", "num_speculative_tokens": 5, "force": True}
    found = []
    for config, exact, dtype in (
        (None, True, "float32"), (None, True, "bfloat16"), (None, False, "bfloat16"), (ngram, False, "bfloat16"),
    ):  # fmt: skip
        with LLM(path, config, device="cuda", dtype=dtype, max_model_len=128, max_num_seqs=1, exact=exact) as llm:
            outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
            rows = [row for output in outputs for row in output.logprobs or []]
            found.append([{id: each.logprob for id, each in row.items()} for row in rows])
        assert not (exact and used)
    assert all(len(rows) == 3 * 24 for rows in found)
    wanted, exact_error, *errors = found[0], *(distance(rows, found[0]) for rows in found[1:])
    assert max(errors) < 1.5 * exact_error
    assert exact_error < 0.2 * max(abs(value) for row in wanted for value in row.values())
    return used if module else None


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_large_matrices_of_few_rows(
    family: str, target_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128}
    path = target_path(family, hidden_size=2560, intermediate_size=10240, **heads)
    used = rows_multiplied(path, "dense_held", "linear", monkeypatch)
    assert used is None or (1 in used and max(used) == 6)


def test_experts_of_few_rows(target_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 192, "num_experts": 16, "num_experts_per_tok": 4}
    used = rows_multiplied(target_path("qwen3_moe", **sizes), "streamed_experts", "up", monkeypatch)
    assert used is None or max(used) == 6


def test_mxfp4_of_few_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _, _ = mxfp4_model(tmp_path)
    prompts = [[5, 6, 7, 8, 9] * 3, [40, 41], list(range(30, 60))]
    used = rows_multiplied(path, "held_experts", "up", monkeypatch, prompts)
    assert used is None or 1 in used
