"""Products whose weights go straight into registers, in numpy; and the assembly that widens numbers, word by word."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_triton import CUDA
from test_triton_quantised import DEVICE, random_weight

pytest.importorskip("triton.experimental.gluon.language.nvidia.ampere")

from for_hopper import assert_all_compile
from gluon_words import Kernel

from outrider.kernels.activation import gelu_tanh_mul, silu_mul
from outrider.kernels.gpu import epilogue, gates, held, product_parts, quantised, widen
from outrider.kernels.gpu.held import Tile
from outrider.kernels.gpu.product_parts import counters_for
from outrider.kernels.quantised import FP4_VALUES, Kind, gathered

SIGNED_FP4 = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)])


@pytest.fixture(autouse=True)
def anywhere() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not CUDA:
            patch.setattr(held, "_held", Kernel("_held", gates, epilogue, held))
        yield


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sums that another launch has made."""
    empty = torch.empty

    def filled(*size: Any, **options: Any) -> torch.Tensor:
        made = empty(*size, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", filled)


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "MOST_OF_MANY", 16)


def compare(rows: int, columns: int, runs: int, tile: Tile | None, *, kind: Kind = Kind.INT4, gated: int = 0,
            has_offset: bool = False, has_bias: bool = False, has_residual: bool = False) -> None:  # fmt: skip
    dtype = torch.bfloat16 if CUDA else torch.float32
    torch.manual_seed(rows)
    weight = random_weight(kind, columns * (2 if gated else 1), runs, 128, has_offset=has_offset, is_ordered=False)
    x = torch.randn(rows, runs * 128, device=DEVICE).to(dtype)
    bias = torch.randn(len(weight.data), device=DEVICE).to(dtype) if has_bias else None
    residual = torch.randn(rows, columns, device=DEVICE).to(dtype) if has_residual else None
    assert held.fits(x, weight, residual, gated)
    out = torch.full((rows, columns), float("nan"), dtype=dtype, device=DEVICE)
    found = held.linear(x, weight, bias, residual, gated=gated, out=out, tile=tile)
    counters = counters_for(x.device, 8)
    assert counters is not None
    assert not counters.any()
    wanted = x.float() @ weight.dense(torch.float32).T + (0 if bias is None else bias.float())
    if gated:
        wanted = (silu_mul if gated == gates.SILU else gelu_tanh_mul)(wanted)
    wanted += 0 if residual is None else residual.float()
    error = (found.float() - wanted).abs().max() / wanted.abs().max()
    assert error < (2e-2 if CUDA else 1e-5), error


@pytest.mark.parametrize("tile", [Tile(1, 4, 1), Tile(2, 4, 2), Tile(4, 8, 3), Tile(1, 4, 4), None])
@pytest.mark.parametrize("rows", [1, 8])
def test_products(rows: int, tile: Tile | None) -> None:
    compare(rows, 64, 8, tile)
    compare(rows, 64, 7, tile, has_bias=True, has_residual=True)  # not a run for every warp
    compare(rows, 64, 1, tile, kind=Kind.UINT4)


@pytest.mark.parametrize("kind", [Kind.INT4, Kind.UINT4])
def test_offsets(kind: Kind) -> None:
    compare(3, 64, 9, Tile(2, 4, 2), kind=kind, has_offset=True)
    compare(3, 64, 8, Tile(2, 4, 2), kind=kind, has_offset=True, gated=gates.SILU)


@pytest.mark.parametrize("gated", [gates.SILU, gates.GELU])
@pytest.mark.parametrize("tile", [Tile(2, 4, 2), Tile(4, 4, 1), None])
def test_gates(tile: Tile | None, gated: int) -> None:
    compare(5, 64, 9, tile, gated=gated, has_bias=True)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("tile", [Tile(1, 8, 2), Tile(4, 4, 1), None])
@pytest.mark.parametrize("rows", [9, 12, 16])
def test_products_of_sixteen_rows(rows: int, tile: Tile | None) -> None:
    compare(rows, 64, 8, tile)
    compare(rows, 64, 7, tile, has_bias=True, has_residual=True)
    compare(rows, 64, 1, tile, kind=Kind.UINT4)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("kind", [Kind.INT4, Kind.UINT4])
@pytest.mark.parametrize("rows", [9, 12, 16])
def test_offsets_and_gates_of_sixteen_rows(rows: int, kind: Kind) -> None:
    compare(rows, 64, 9, Tile(2, 4, 2), kind=kind, has_offset=True)
    compare(rows, 64, 8, Tile(4, 4, 1), kind=kind, has_offset=True, gated=gates.SILU)
    compare(rows, 64, 9, None, kind=kind, gated=gates.GELU, has_bias=True)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize(
    "tile", [Tile(1, 4, 2, 2), Tile(2, 8, 1, 3), Tile(4, 4, 1, 4), Tile(4, 8, 2, 2), Tile(8, 4, 1, 2)]
)
@pytest.mark.parametrize("rows", [1, 8, 9, 16])
def test_inputs_that_programs_share(rows: int, tile: Tile) -> None:
    compare(rows, 128, 16, tile)
    compare(rows, 128, 11, tile, has_bias=True, has_residual=True)  # parts are not as long as each other
    compare(rows, 128, 9, tile, kind=Kind.UINT4, has_offset=True, has_residual=True)
    compare(rows, 128, 1, tile, has_residual=True)  # more parts than there are runs
    compare(rows, 64, 8, Tile(4, tile.warps, tile.stages, tile.split), gated=gates.SILU)  # which are not shared


@pytest.mark.parametrize("split", [2, 3, 4])
def test_shared_sums_are_added_in_their_order(split: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However programs are scheduled, bits are the same; and without counters nothing is shared."""
    dtype = torch.bfloat16 if CUDA else torch.float32
    weight = random_weight(Kind.INT4, 256, 13, 128, has_offset=False, is_ordered=False)
    x = torch.randn(11, 13 * 128, device=DEVICE).to(dtype)
    alone = held.linear(x, weight, tile=Tile(2, 4, 1))
    found = [held.linear(x, weight, tile=Tile(2, 4, 1, split)) for _ in range(5)]
    assert all(torch.equal(each, found[0]) for each in found)
    assert CUDA or not torch.equal(found[0], alone)  # in 16 bits they may well be the same
    monkeypatch.setattr(product_parts, "MAX_COUNTERS", 7)
    assert torch.equal(held.linear(x, weight, tile=Tile(2, 4, 1, split)), alone)


def test_what_does_not_fit() -> None:
    weight = random_weight(Kind.INT4, 64, 4, 128, has_offset=False, is_ordered=False)
    x = torch.zeros(17, 512, device=DEVICE)
    assert held.fits(x[:16], weight)
    assert not held.fits(x, weight)
    many = random_weight(Kind.INT4, held.MANY, 4, 128, has_offset=False, is_ordered=False)
    for wide, gated in (
        (many, gates.NONE),
        (random_weight(Kind.INT4, 128, 4, 128, has_offset=False, is_ordered=False), gates.SILU),
    ):
        assert held.fits(x[:8], wide, gated=gated)
        assert not held.fits(x[:9], wide, gated=gated)
    assert not held.fits(torch.zeros(1024, 4, device=DEVICE).T[:, ::2], weight)
    for kind, columns, group, ordered in (
        (Kind.FP4, 64, 32, False), (Kind.INT8, 64, 128, False), (Kind.INT4, 64, 64, False), (Kind.INT4, 66, 128, False),
        (Kind.INT4, 64, 128, True),
    ):  # fmt: skip
        other = random_weight(kind, columns, 512 // group, group, has_offset=False, is_ordered=ordered)
        assert not held.fits(x[:8], other), (kind, columns, group, ordered)


@pytest.mark.parametrize(("rows", "exact", "is_used"), [(16, False, True), (17, False, False), (8, True, False)])
def test_where_it_is_used(rows: int, exact: bool, is_used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised, "on_hopper", lambda name, device: held)
    monkeypatch.setattr(held, "linear", lambda *given, **named: "held")
    monkeypatch.setattr(quantised.sliced, "linear", lambda *given, **named: "sliced")
    monkeypatch.setattr(quantised.wide, "linear", lambda *given, **named: "wide")
    weight = random_weight(Kind.INT4, 64, 4, 128, has_offset=False, is_ordered=False)
    x = torch.zeros(rows, 512, dtype=torch.bfloat16, device=DEVICE)
    found: object = quantised.linear(x, weight, exact=exact)
    assert (found == "held") == is_used


def pair(value: torch.Tensor) -> torch.Tensor:
    """[2, W] bfloat16 of words [W]."""
    return torch.stack((value & 0xFFFF, value >> 16 & 0xFFFF)).to(torch.uint16).view(torch.bfloat16).double()


def word(pairs: torch.Tensor) -> torch.Tensor:
    low, high = pairs.bfloat16().view(torch.uint16).long()
    return low | high << 16


def ran(assembly: str, words: torch.Tensor, num_results: int) -> list[torch.Tensor]:
    """What lines of PTX make of words [W] of 32 bits: pairs of bfloat16."""
    known: dict[str, Any] = {f"${num_results}": words}

    def value(text: str) -> torch.Tensor:
        return known[text] if text in known else torch.full_like(words, int(text, 0))

    for line in assembly.strip("{} ").split(";"):
        if not line.strip() or line.split()[0].startswith(".reg"):
            continue
        name, rest = line.split(maxsplit=1)
        target, *given = (each.strip() for each in rest.split(","))
        a, *others = (value(each) for each in given)
        if name == "mov.b32":
            known[target] = a
        elif name in ("shr.b32", "shl.b32"):
            known[target] = (a >> others[0] if name[2] == "r" else a << others[0]) & 0xFFFFFFFF
        elif name == "and.b32":
            known[target] = a & others[0]
        elif name == "lop3.b32":
            assert given[-1] == "0xea"
            known[target] = a & others[0] | others[1]
        else:
            found = re.fullmatch(r"(add|sub|mul|fma)\.rn\.bf16x2", name)
            assert found, name
            b = pair(others[0])
            made = {"add": pair(a) + b, "sub": pair(a) - b, "mul": pair(a) * b, "fma": pair(a) * b}[found[1]]
            known[target] = word(made + pair(others[1]) if found[1] == "fma" else made)
    return [pair(known[f"${number}"]) for number in range(num_results)]


@pytest.mark.parametrize("name", ["INT4", "UINT4", "RAISED", "FP4", "FP8"])
def test_assembly(name: str) -> None:
    """Every word of 16 bits, beside another: sums, products and all that is exact in bfloat16 is exact here."""
    low = torch.arange(65536)
    high = low.flip(0) ^ 0x5A5A
    parts = 2 if name == "FP8" else 4
    found = ran(getattr(widen, f"{name}_ASM").value, low | high << 16, parts)
    for half, bits in enumerate((low, high)):
        words = gathered(bits.to(torch.int16)).long() & 0xFFFF if name == "FP4" else bits
        for part in range(parts):
            number = words >> 16 // parts * part & 2 ** (16 // parts) - 1
            if name == "FP8":
                wanted = number.to(torch.uint8).view(torch.float8_e4m3fn).double()
            elif name == "FP4":
                wanted = SIGNED_FP4[number].double()
            else:
                wanted = (number - {"INT4": 8, "UINT4": 0, "RAISED": -128}[name]) / 8
            same = (found[part][half] == wanted) | wanted.isnan()
            assert same.all(), (part, half, low[~same][:4], found[part][half][~same][:4], wanted[~same][:4])


COMPILED = """
import sys
from for_hopper import made
from outrider.kernels.gpu import held

types = dict.fromkeys(("x", "bias", "residual", "out"), "*bf16") | dict.fromkeys(("data", "counters"), "*i32")
types |= dict.fromkeys(("scale", "offset", "sums"), "*fp32")
for text in sys.argv[1:]:
    rows, tiles, warps, stages, gated, even, offset, split = map(int, text.split(","))
    constants = dict(
        RAISE=17.0, EVEN=bool(even), HAS_OFFSET=bool(offset), GATED=gated, HAS_BIAS=False, HAS_RESIDUAL=not gated,
        ROWS=rows, TILES=tiles, WARPS=warps, STAGES=stages, SPLIT=split, EARLY=True,
    )
    compiled = made(held._held, constants, types, odd=["num_rows"])
    code = compiled.asm["ptx"]
    before, _, after = code.partition("griddepcontrol.wait")
    assert before.count("ld.global.v4") == 2 * tiles * stages, "weights that wait for the input"
    sums = stages * (tiles + (rows == 8 or offset))  # of a run's weights, and of its inputs alone
    assert after.count("mma.sync") == 2 * rows * sums, "not eight products for eight rows, in the loop and behind it"
    assert "ldmatrix" not in code and code.count("bar.sync") <= rows // 2 * tiles
    if split > 1:
        size = 16 * tiles * rows // (4 * 32 * warps)  # of a part, in fours a thread
        assert code.count("ld.global.cg.v4") == split * size and code.count("bar.sync") <= 4
    print(text)
"""


def test_held_compiles_for_hopper() -> None:
    forms = ["8,1,4,4,0,1,0", "8,2,4,2,1,1,0", "8,4,4,2,0,1,0", "8,1,8,2,0,0,1", "16,1,4,4,0,1,0", "16,4,4,2,1,0,1"]
    forms = [*(f"{form},1" for form in forms), "16,4,4,1,0,1,0,4", "16,4,8,2,0,0,1,2"]
    assert_all_compile(COMPILED, forms)
