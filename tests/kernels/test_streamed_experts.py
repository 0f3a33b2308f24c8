"""Experts in 16 bits that few programs read one after the other, in numpy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_held_experts import experts_of
from test_triton import CUDA
from test_triton_few_bits_experts import DEVICE

pytest.importorskip("triton.experimental.gluon.language.nvidia.ampere")

from for_hopper import assert_all_compile
from gluon_words import Kernel

from outrider.kernels.activation import Activation, ClampedSwish, relu2, silu_mul
from outrider.kernels.gpu import choice, dense_held, few_experts, gates, streamed_experts
from outrider.kernels.gpu.streamed_experts import Tile
from outrider.kernels.moe import ExpertWeights, experts_reference

HALF = torch.bfloat16 if CUDA else torch.float16  # numpy knows no bfloat16


@pytest.fixture(autouse=True)
def anywhere() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not CUDA:
            for name in ("_up", "_down"):
                patch.setattr(streamed_experts, name, Kernel(name, gates, choice, dense_held, streamed_experts))
            patch.setattr(streamed_experts, "num_processors", lambda device: 3)
        patch.setattr(few_experts, "on_hopper", lambda name, device: {"streamed_experts": streamed_experts}[name])
        yield


def compare(
    ids: torch.Tensor, hidden: int, inner: int, tiles: tuple[Tile | None, Tile | None] = (None, None), *,
    experts: int = 6, has_bias: bool = True, activation: Activation = silu_mul, has_residual: bool = True,
) -> None:  # fmt: skip
    rows, chosen = ids.shape
    number, _, _ = gate = gates.gate_of(activation)
    width = 2 * inner if gates.has_two(number) else inner
    up, down = (
        (torch.randn(experts, *size, device=DEVICE) * size[1] ** -0.5).to(HALF)
        for size in ((width, hidden), (hidden, inner))
    )
    x, residual = (torch.randn(rows, hidden, device=DEVICE).to(HALF) for _ in range(2))
    shares = torch.rand(rows, chosen, device=DEVICE)
    biases = [torch.randn(experts, size, device=DEVICE).to(HALF) for size in (width, hidden)]
    up_bias, down_bias = biases if has_bias else (None, None)
    dense = ExpertWeights(up.float(), down.float(), *((bias.float() for bias in biases) if has_bias else ()))
    wanted = experts_reference(x.float(), ids.long(), shares, dense, activation)
    wanted = wanted + residual.float() if has_residual else wanted
    more = residual if has_residual else None
    if tiles == (None, None):
        found = few_experts.experts(x, ids, shares, ExpertWeights(up, down, up_bias, down_bias), activation, more)
    else:
        middle = streamed_experts.up(x, ids, up, up_bias, gate, tiles[0])
        found = streamed_experts.down(middle, ids, shares, down, down_bias, more, tiles[1])
    error = (found.float() - wanted).abs().max() / wanted.abs().max()
    assert error < (2e-2 if CUDA else 3e-3), error


@pytest.mark.parametrize("tiles", [(Tile(4, 32, 2), Tile(4, 64, 3)), (Tile(2, 64, 5, 2), Tile(4, 32, 8)), (None, None)])
@pytest.mark.parametrize("rows", [2, 6, 8])
def test_experts(rows: int, tiles: tuple[Tile | None, Tile | None]) -> None:
    compare(experts_of(rows, 6, 3, 5), 256, 160, tiles)
    compare(experts_of(rows, 6, 2, 2), 96, 512, tiles, has_bias=False, has_residual=False)
    compare(experts_of(rows, 6, 1, 1), 48, 32, tiles)


@pytest.mark.parametrize("activation", [ClampedSwish(1.7, 1.0), relu2])
def test_many_experts_and_other_activations(activation: Activation) -> None:
    tiles = (Tile(4, 32, 3), Tile(4, 32, 4))
    compare(experts_of(8, 40, 5, 40), 128, 64, tiles, experts=40, activation=activation)


def test_one_row() -> None:
    compare(experts_of(1, 6, 3, 6), 128, 64, (Tile(4, 32, 3), Tile(4, 32, 4)))


def test_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for name in ("up", "down"):

        def spy(*args: Any, original: Any = getattr(streamed_experts, name), name: str = name, **options: Any) -> Any:  # noqa: B008
            called.append(name)
            return original(*args, **options)

        monkeypatch.setattr(streamed_experts, name, spy)
    compare(experts_of(4, 6, 2, 6), 64, 32)
    assert called == ["up", "down"]


def test_what_does_not_fit() -> None:
    ids = experts_of(8, 6, 2, 6)
    weight = torch.zeros(6, 64, 64, dtype=HALF, device=DEVICE)
    x = torch.zeros(8, 64, dtype=HALF, device=DEVICE)
    assert streamed_experts.fits(x, ids, weight, gates.SILU)
    assert not streamed_experts.fits(x, ids, weight[:, :48], gates.SILU)
    assert not streamed_experts.fits(x, ids, weight.mT, gates.SILU)
    assert not streamed_experts.fits(x.float(), ids, weight, gates.SILU)
    assert not streamed_experts.fits(x.float(), ids, weight.float(), gates.SILU)
    assert not streamed_experts.fits(x[:, :60], ids, weight[:, :, :60].contiguous(), gates.SILU)
    assert not streamed_experts.fits(x.repeat(2, 1), ids.repeat(2, 1), weight, gates.SILU)
    long = torch.zeros(6, 64, 4104, dtype=HALF, device=DEVICE)
    assert not streamed_experts.fits(torch.zeros(8, 4104, dtype=HALF, device=DEVICE), ids, long, gates.NONE)
    wide = torch.zeros(1, 16, 16384, dtype=HALF, device=DEVICE)
    assert not streamed_experts.fits(torch.zeros(8, 16384, dtype=HALF, device=DEVICE), ids, wide, gates.NONE)


COMPILED = """
import sys
from for_hopper import made
from outrider.kernels.gpu import streamed_experts

for text in sys.argv[1:]:
    up, warps, span, stages, inner = map(int, text.split(","))
    kernel = streamed_experts._up if up else streamed_experts._down
    constants = dict(
        INNER=inner, CHOSEN=8, PAIRS=64, HAS_BIAS=inner < 1024, WARPS=warps, SPAN=span, STAGES=stages, EARLY=True,
    )
    constants |= dict(GATE=1, TWO=True) if up else dict(HAS_RESIDUAL=True, KNOWN=True)
    types = dict.fromkeys(("x", "weight", "bias", "residual", "out"), "*bf16")
    types |= {"ids": "*i32" if inner < 1024 else "*i64", "shares": "*fp32", "alpha": "fp32", "limit": "fp32"}
    compiled = made(kernel, constants, types, odd=["num_pairs", "alpha", "limit"])
    code = compiled.asm["ptx"]
    before, _, after = code.partition("griddepcontrol.wait")
    assert ("cp.async" in before) == (not up), "weights that wait for the way up, or that nobody has chosen yet"
    steps = -(-inner // (warps * span))
    assert after.count("mma.sync") == steps * span // 16
    assert compiled.metadata.shared <= 227 * 2**10
    print(text)
"""


def test_streamed_experts_compile_for_hopper() -> None:
    forms = ["1,4,128,6,2048", "1,4,64,6,1000", "0,4,64,8,768", "0,4,64,8,1408"]
    assert_all_compile(COMPILED, forms)
