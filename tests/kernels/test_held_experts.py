"""Experts in MXFP4 whose weights go straight into registers, in numpy; and as a GPU's compiler sees them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_triton import CUDA
from test_triton_few_bits_experts import DEVICE, random_stack

pytest.importorskip("triton.experimental.gluon.language.nvidia.ampere")

from for_hopper import assert_all_compile
from gluon_words import Kernel

from outrider.kernels.activation import Activation, ClampedSwish, silu_mul
from outrider.kernels.gpu import choice, few_experts, gates, held, held_experts
from outrider.kernels.gpu.held_experts import Tile
from outrider.kernels.moe import ExpertWeights, experts_reference
from outrider.kernels.quantised import Kind, dense_reference

DTYPE = torch.bfloat16 if CUDA else torch.float32


@pytest.fixture(autouse=True)
def anywhere() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not CUDA:
            patch.setattr(held_experts, "_held", Kernel("_held", gates, choice, held, held_experts))
        patch.setattr(few_experts, "on_hopper", lambda name, device: {"held_experts": held_experts}[name])
        yield


def experts_of(rows: int, experts: int, chosen: int, among: int) -> torch.Tensor:
    """[T, k]"""
    generator = torch.Generator().manual_seed(rows)
    some = torch.randperm(experts, generator=generator)[:among]
    ids = [some[torch.randperm(among, generator=generator)[:chosen]] for _ in range(rows)]
    return torch.stack(ids).int().to(DEVICE)


def compare(
    ids: torch.Tensor, hidden: int, inner: int, tiles: tuple[Tile | None, Tile | None] = (None, None), *,
    experts: int = 6, has_bias: bool = True, activation: Activation = silu_mul, has_residual: bool = True,
) -> None:  # fmt: skip
    rows, chosen = ids.shape
    up, down = (
        random_stack(Kind.FP4, experts, *size, 32, has_offset=False, seed=seed)
        for seed, size in enumerate(((2 * inner, hidden), (hidden, inner)))
    )
    x, residual = (torch.randn(rows, hidden, device=DEVICE).to(DTYPE) for _ in range(2))
    shares = torch.rand(rows, chosen, device=DEVICE)
    biases = [torch.randn(experts, size, device=DEVICE).to(DTYPE) for size in (2 * inner, hidden)]
    up_bias, down_bias = biases if has_bias else (None, None)
    widened = (dense_reference(each.matrix, torch.float32).view(each.shape) for each in (up, down))
    dense = ExpertWeights(*widened, *((bias.float() for bias in biases) if has_bias else ()))
    wanted = experts_reference(x.float(), ids.long(), shares, dense, activation)
    wanted = wanted + residual.float() if has_residual else wanted
    more = residual if has_residual else None
    if tiles == (None, None):
        weights = ExpertWeights(up, down, up_bias, down_bias)
        found = few_experts.experts(x, ids, shares, weights, activation, more)
    else:
        middle = held_experts.up(x, ids, up, up_bias, gates.gate_of(activation), tiles[0])
        found = held_experts.down(middle, ids, shares, down, down_bias, more, tiles[1])
    error = (found.float() - wanted).abs().max() / wanted.abs().max()
    assert error < (2e-2 if CUDA else 1e-5), error


@pytest.mark.parametrize("tiles", [(Tile(2, 4, 1), Tile(1, 4, 2)), (Tile(4, 4, 2), Tile(2, 4, 3)), (None, None)])
@pytest.mark.parametrize("rows", [1, 2, 6, 8])
def test_experts(rows: int, tiles: tuple[Tile | None, Tile | None]) -> None:
    compare(experts_of(rows, 6, 3, 5), 256, 160, tiles)
    compare(experts_of(rows, 6, 2, 2), 64, 1024, tiles, has_bias=False, has_residual=False)


def test_more_experts_than_programs_and_warps() -> None:
    few = Tile(2, 8, 1, programs=3)
    compare(experts_of(8, 40, 5, 40), 128, 64, (few, few), experts=40, activation=ClampedSwish(1.7, 1.0))


def test_inputs_that_end_within_a_run_are_not_read_beyond() -> None:
    compare(experts_of(3, 6, 2, 6), 64, 32)
    compare(experts_of(3, 6, 2, 6), 192, 96)


def test_what_does_not_fit() -> None:
    def is_taken(kind: Kind = Kind.FP4, num_rows: int = 8, height: int = 64, width: int = 64, group: int = 32) -> bool:
        weight = random_stack(kind, 2, height, width, group, has_offset=False, seed=1)
        x, ids = torch.zeros(num_rows, width, dtype=DTYPE, device=DEVICE), experts_of(num_rows, 2, 2, 2)
        return held_experts.fits(x, ids, weight, gates.NONE)

    assert is_taken()
    assert not is_taken(num_rows=9)
    assert not is_taken(Kind.INT4)
    assert not is_taken(height=48)
    assert not is_taken(group=64)  # whose scales are no powers of two
    weight = random_stack(Kind.FP4, 2, 64, 64, 32, has_offset=False, seed=1)
    x, ids = torch.zeros(4, 66, dtype=DTYPE, device=DEVICE), experts_of(4, 2, 2, 2)
    assert not held_experts.fits(x[:, :64], ids, weight, gates.NONE)
    assert not held_experts.fits(x[:, 1:65], ids, weight, gates.NONE)


@pytest.mark.parametrize(("rows", "is_used"), [(1, True), (3, True), (4, False)])
def test_where_it_is_used(rows: int, is_used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def spy(*args: Any, original: Any = held_experts._answer, **options: Any) -> None:
        called.append(options["is_known"])
        original(*args, **options)

    called: list[bool] = []
    monkeypatch.setattr(held_experts, "_answer", spy)
    compare(experts_of(rows, 6, 2, 6), 64, 32)
    assert called == ([False, True] if is_used else [])


COMPILED = """
import re
import sys
from for_hopper import made
from outrider.kernels.gpu import held_experts

for text in sys.argv[1:]:
    up, tiles, warps, stages, even, chosen = map(int, text.split(","))
    constants = dict(
        CHOSEN=chosen, PAIRS=32, IS_UP=bool(up), EVEN=bool(even), GATE=3 * up, TWO=bool(up), HAS_BIAS=True,
        TILES=tiles, WARPS=warps, STAGES=stages, KNOWN=not up, EARLY=True,
    )
    types = dict.fromkeys(("x", "bias"), "*bf16") | dict.fromkeys(("data", "scale"), "*i32")
    types |= {"ids": "*i64" if even else "*i32", "out": "*bf16" if up else "*fp32", "alpha": "fp32", "limit": "fp32"}
    compiled = made(held_experts._held, constants, types, odd=["num_pairs", "num_runs", "alpha", "limit"])
    code = compiled.asm["ptx"]
    before = code.partition("griddepcontrol.wait")[0]
    asked = len(re.findall(r"\\n\\s+ld.global.v4", before))  # by all lanes, which inputs are not
    assert asked == (0 if up else 2 * tiles * stages), "weights that wait for the way up, or before anybody chose"
    assert code.count("mma.sync") == 16 * tiles * stages, "not eight products of a run, in the loop and behind it"
    assert "ldmatrix" not in code
    print(text)
"""


def test_held_experts_compile_for_hopper() -> None:
    forms = ["1,4,4,1,0,4", "1,2,4,2,1,4", "0,2,4,1,0,4", "0,4,4,1,0,2"]
    assert_all_compile(COMPILED, forms)
