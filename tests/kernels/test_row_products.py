"""Products of some hundred rows as Hopper computes them: the kernel itself, Gluon's words in numpy, and compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_triton import CUDA, random

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from gluon_words import Kernel

from outrider.kernels import linear
from outrider.kernels.activation import gelu_tanh_mul, silu_mul
from outrider.kernels.gpu import epilogue, gates, product_parts, row_exchange, row_products
from outrider.kernels.gpu import linear as gpu_linear
from outrider.kernels.gpu.row_products import Tile

ON_CPU = pytest.mark.skipif(CUDA, reason="words in numpy know no device")
GATES = {gates.SILU: silu_mul, gates.GELU: gelu_tanh_mul}


@pytest.fixture(scope="module")
def anywhere() -> Any:
    """As on a small Hopper."""
    with pytest.MonkeyPatch.context() as patch:
        kernel = Kernel("_row_products", gates, epilogue, row_exchange, row_products)
        kernel.at_a_time = 5  # programs that exchange their sums wait for each other
        patch.setattr(row_products, "num_processors", lambda device: 5)
        patch.setattr(row_products, "_row_products", kernel)
        yield


def compare(
    rows: int, outputs: int, inputs: int, tile: Tile | None = None, *, has_bias: bool = False,
    has_residual: bool = False, gated: int = gates.NONE, kind: torch.dtype = torch.float16, tolerance: float = 2e-3,
) -> None:  # fmt: skip
    """With a reference in float64. Inputs and residual lie beside something else."""
    x = random(rows, inputs + 8, dtype=kind)[:, :inputs]
    weight = (random(outputs, inputs, seed=3) * inputs**-0.5).to(kind)
    bias = random(outputs, dtype=kind, seed=4) if has_bias else None
    residual = random(rows, 2 * outputs, dtype=kind, seed=5)[:, outputs:] if has_residual else None
    assert row_products.fits(rows, weight)
    wanted = x.double() @ weight.double().T
    wanted = wanted if bias is None else wanted + bias.double()
    wanted = GATES[gated](wanted) if gated else wanted
    wanted = wanted if residual is None else wanted + residual.double()
    for _ in range(2):
        found = row_products.linear(x, weight, bias, residual, gated=gated, tile=tile)
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


@ON_CPU
@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "tile"),
    [
        (33, 256, 256, Tile(2, 3)),
        (65, 300, 200, Tile(2, 2)),  # nothing is a multiple of a tile
        (128, 1500, 192, Tile(2, 4)),  # several pieces of work for a program
        (129, 1000, 64, Tile(1, 3)),  # fewer steps than stages
        (192, 384, 320, Tile(2, 3, 2)),
        (100, 130, 1000, Tile(1, 2, 4)),
        (200, 700, 136, Tile(1, 6, 2)),  # more pieces than programs
        (320, 192, 328, Tile(1, 4, 3)),
        (257, 136, 64, Tile(1, 4, 8)),  # more parts than steps
        (100, 300, 200, Tile(1, 2, 2, joined=True)),
        (192, 260, 520, Tile(1, 3, 4, joined=True)),  # more pieces than programs
        (160, 500, 320, Tile(2, 3, 3, joined=True)),
        (64, 136, 640, Tile(2, 3, 5, joined=True)),
    ],
)
@pytest.mark.parametrize("has_residual", [False, True])
def test_products(rows: int, outputs: int, inputs: int, tile: Tile, has_residual: bool) -> None:
    compare(rows, outputs, inputs, tile, has_residual=has_residual)


@ON_CPU
@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize(
    ("tile", "has_bias"),
    [(Tile(2, 3), False), (Tile(2, 3), True), (Tile(1, 3, 2), False), (Tile(2, 3, 2, joined=True), False)],
)
@pytest.mark.parametrize("gated", list(GATES))
def test_gates(tile: Tile, has_bias: bool, gated: int) -> None:
    """On the way out of the product, or of the sum of parts."""
    compare(90, 2 * 600, 200, tile, has_bias=has_bias, gated=gated, tolerance=4e-3)


@ON_CPU
@pytest.mark.usefixtures("anywhere")
@settings(max_examples=12, deadline=None)
@given(rows=st.integers(33, 320), outputs=st.integers(8, 90), inputs=st.integers(1, 60), gated=st.sampled_from([0, 1]))
def test_any_size(rows: int, outputs: int, inputs: int, gated: int) -> None:
    """With the tile that is chosen for it, which must fit into shared memory and registers."""
    height, inner = outputs * 8, inputs * 8
    tile = row_products.tile_for(rows, height, inner, gated, 132)
    covered = row_products.blocks_of_rows(rows)
    assert 0 <= sum(covered) - rows < max(sum(covered) // 2, 32)
    assert tile.stages * (128 * tile.blocks + sum(covered)) * 128 <= row_products.MAX_SHARED
    assert tile.stages >= 3
    assert tile.blocks * sum(covered) // 2 <= row_products.MAX_SUMS
    compare(rows, height, inner, gated=gated, tolerance=4e-3)


@ON_CPU
@pytest.mark.usefixtures("anywhere")
def test_parts_are_added_in_their_order() -> None:
    """However programs are scheduled, bits are the same."""
    x, weight = random(70, 1024, dtype=torch.float16), random(256, 1024, dtype=torch.float16)
    for tile in (Tile(2, 3, 8), Tile(1, 3, 4, joined=True)):
        found = [row_products.linear(x, weight, tile=tile) for _ in range(4)]
        assert all(torch.equal(each, found[0]) for each in found)


@ON_CPU
@pytest.mark.usefixtures("anywhere")
def test_sums_are_exchanged_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """And counters are as they were; without counters, or with a bias, there are two launches."""
    x, weight = random(70, 256, dtype=torch.float16), random(256, 256, dtype=torch.float16)
    bias, residual = random(256, dtype=torch.float16), random(70, 256, dtype=torch.float16)
    added, tile = [], Tile(1, 3, 2, joined=True)
    two = row_products._add_up

    class Counted:
        def __getitem__(self, grid: tuple[int, int]) -> Any:
            added.append(grid)
            return two[grid]

    monkeypatch.setattr(row_products, "_add_up", Counted())
    found = row_products.linear(x, weight, residual=residual, tile=tile)
    wanted = row_products.linear(x, weight, residual=residual, tile=Tile(1, 3, 2))
    assert len(added) == 1
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)  # of two parts, the order does not matter
    counters = product_parts.counters_for(x.device, 4)
    assert counters is not None
    assert not counters.any()
    row_products.linear(x, weight, bias, tile=tile)
    assert len(added) == 2
    monkeypatch.setattr(product_parts, "MAX_COUNTERS", 3)
    torch.testing.assert_close(row_products.linear(x, weight, residual=residual, tile=tile), wanted, rtol=0, atol=0)
    assert len(added) == 3


def test_blocks_of_rows() -> None:
    sizes = [33, 64, 65, 96, 97, 128, 129, 160, 161, 192, 193, 256, 257, 288, 320]
    covered = [row_products.blocks_of_rows(size) for size in sizes]
    assert covered == [
        (64, 0), (64, 0), (64, 32), (64, 32), (128, 0), (128, 0), (128, 32), (128, 32), (128, 64), (128, 64), (256, 0),
        (256, 0), (256, 32), (256, 32), (256, 64),
    ]  # fmt: skip


def test_tiles_are_those_that_were_fastest() -> None:
    """Llama-3.1-8B's matrices on an H200, and the way down of Qwen3-8B and Gemma-3-4B."""
    rows = (33, 64, 96, 128, 192, 256, 320)
    assert [row_products.tile_for(count, 28672, 4096, 1, 132) for count in rows] == [
        Tile(2, 5), Tile(2, 5), Tile(2, 3), Tile(2, 3), Tile(2, 3), Tile(1, 4), Tile(1, 3),
    ]  # fmt: skip
    shapes = [(6144, 4096), (4096, 4096), (4096, 14336), (4096, 12288), (2560, 10240)]
    tiles = [row_products.tile_for(192, height, inner, 0, 132) for height, inner in shapes]
    assert tiles == [Tile(1, 5, 2), Tile(1, 5, 4), Tile(1, 5, 4), Tile(1, 5, 4), Tile(1, 5, 6)]


@pytest.mark.parametrize(
    ("shape", "gated", "rows"),
    [
        ((28672, 4096), gates.SILU, range(33, 321)),
        ((24576, 4096), gates.SILU, range(33, 193)),
        ((20480, 2560), gates.GELU, range(33, 193)),
        ((14336, 4096), gates.SILU, range(0)),  # half of Llama-3.1-8B's: too few tiles
        ((28672, 4096), gates.NONE, range(0)),
        ((6144, 4096), gates.NONE, range(0)),
        ((4096, 4096), gates.NONE, range(0)),
        ((4096, 14336), gates.NONE, range(0)),
        ((4096, 12288), gates.NONE, range(161, 193)),
        ((2560, 10240), gates.NONE, range(0)),
    ],
)
def test_it_is_used_where_it_was_faster(
    shape: tuple[int, int], gated: int, rows: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a Hopper, and nowhere else; never where bits must not depend on the number of rows, nor with a bias."""
    weight = torch.empty(shape, dtype=torch.bfloat16)  # never touched

    def chosen(**more: Any) -> list[int]:
        return [each for each in range(1, 400) if gpu_linear._row_products(each, weight, gated, **more) is not None]

    assert chosen(has_bias=False) == []
    monkeypatch.setattr(gpu_linear, "on_hopper", lambda name, device: row_products)
    assert chosen(has_bias=False) == list(rows)
    assert chosen(has_bias=True) == []
    for count in (65, 128, 192, 256, 320):
        assert gpu_linear.is_faster(count, weight, gated) == (count in rows)
        assert not gpu_linear.is_faster(count, weight, gated, has_bias=True)


def test_what_does_not_fit() -> None:
    """Everything else stays with the library."""
    weight = random(256, 128, dtype=torch.bfloat16)
    assert row_products.fits(33, weight)
    assert row_products.fits(320, weight)
    assert not row_products.fits(32, weight)
    assert not row_products.fits(321, weight)
    assert not row_products.fits(64, weight.float())
    assert not row_products.fits(64, weight[:, 1:65])
    assert not row_products.fits(64, weight.T)
    assert not row_products.fits(64, weight[:, :100].contiguous())


@ON_CPU
@pytest.mark.usefixtures("anywhere")
def test_inputs_that_cannot_be_copied_as_they_lie() -> None:
    x, weight = random(40, 72, dtype=torch.float16), random(64, 64, dtype=torch.float16)
    for each in (x[:, 1:65], random(64, 40, dtype=torch.float16).T):
        wanted = each.double() @ weight.double().T
        torch.testing.assert_close(row_products.linear(each, weight).double(), wanted, rtol=2e-3, atol=2e-3)


def test_weights_that_were_just_widened_are_not_read_early() -> None:
    """With more rows than these, weights in few bits are widened by the launch before."""
    assert row_products.RESIDENT_ROWS <= linear.MANY_ROWS


@ON_CPU
@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("gated", [gates.NONE, gates.SILU])
def test_linears_use_it(gated: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through what layers call: where the table says so, and not in exact mode, whose bits stay what they are."""
    x, weight = random(40, 64, dtype=torch.float16), random(128, 64, dtype=torch.float16)
    monkeypatch.setattr(linear, "use_triton", lambda x: True)
    monkeypatch.setattr(gpu_linear, "SMALL", 0)
    ours = row_products.linear
    launches = []
    monkeypatch.setattr(row_products, "linear", lambda *a, **k: launches.append(1) or ours(*a, **k))

    def run(rows: torch.Tensor, exact: bool = False) -> torch.Tensor:
        if gated:
            return linear.gated_linear(rows, weight, activation=silu_mul, exact=exact)
        return linear.linear(rows, weight, exact=exact)

    wanted = x.double() @ weight.double().T
    wanted = (silu_mul(wanted) if gated else wanted).half()
    exactly = run(x, exact=True)
    assert torch.equal(exactly[:7], run(x[:7], exact=True))
    torch.testing.assert_close(run(x), wanted, rtol=4e-3, atol=2e-2)
    assert not launches
    monkeypatch.setattr(gpu_linear, "on_hopper", lambda name, device: row_products)
    small = (bool(gated), range(33, 65), range(128, 129), range(64, 65))
    monkeypatch.setattr(row_products, "FASTER", (small,))
    torch.testing.assert_close(run(x), wanted, rtol=4e-3, atol=2e-2)
    assert len(launches) == 1
    assert torch.equal(run(x, exact=True), exactly)
    assert len(launches) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA or torch.cuda.get_device_capability()[0] != 9, reason="no Hopper")
@pytest.mark.parametrize("rows", [33, 96, 128, 192, 256, 300])
def test_products_on_hopper(rows: int) -> None:
    for height, inner in ((6144, 4096), (4096, 14336), (1000, 200)):
        compare(rows, height, inner, has_residual=True, kind=torch.bfloat16, tolerance=2e-2)
        compare(rows, height, inner, gated=gates.SILU, kind=torch.bfloat16, tolerance=2e-2)
        compare(rows, height, inner, kind=torch.bfloat16, tolerance=2e-2)
        joined = Tile(1, row_products.most_stages(rows, 1), 4, joined=True)
        compare(rows, height, inner, joined, has_residual=True, kind=torch.bfloat16, tolerance=2e-2)


COMPILED = """
import sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from outrider.kernels.gpu import row_products

flat = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
for text in sys.argv[1:]:
    rows, gated, split, joined = map(int, text.split(","))
    first, more = row_products.blocks_of_rows(rows)
    tile = row_products.tile_for(rows, 4096, 4096, gated, 132)
    sums = first + more if split > 1 and not joined else 0
    constants = dict(
        GATED=gated, SUMS=sums, JOINED=bool(joined), RESIDUAL=bool(joined), ROWS=first, MORE=more, BLOCKS=tile.blocks,
        STAGES=tile.stages, EARLY=True,
    )
    box = lambda count: f"tensordesc<bf16[{count}, 64],{flat!r}>"
    types = {"weights": box(64), "rows": box(first), "more_rows": box(more or first)}
    types |= {"out": "*fp32" if sums else "*bf16", "residual": "*bf16", "sums": "*fp32", "counters": "*i32"}
    kernel = row_products._row_products
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    even = {(names.index(name),): [["tt.divisibility", 16]] for name in ("out", "sums", "num_columns")}
    made = compile(
        GluonASTSource(kernel, signature, values, even), target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 4, "launch_pdl": True},
    )
    code = made.asm["ptx"]
    for name in ("wgmma.mma_async", "setmaxnreg.inc", "cp.async.bulk.tensor.2d", "griddepcontrol.wait"):
        assert name in code, name
    for name in ("st.global.v2",) * bool(sums or joined) + ("st.global.v4",) * (not sums):
        assert name in code, name
    assert ("ld.global.cg.v2" in code) == bool(joined)
    assert made.metadata.shared <= 227 * 2**10, made.metadata.shared
    print(text)
kernel = row_products._add_up
constants = dict(GATED=0, HAS_BIAS=True, HAS_RESIDUAL=True, SPLIT=5, SUMS=192, BLOCK_M=32, BLOCK_N=64, EARLY=True)
names = kernel.arg_names
types = dict.fromkeys(("bias", "residual", "out"), "*bf16") | {"sums": "*fp32"}
signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
values = {(names.index(name),): value for name, value in constants.items()}
compile(ASTSource(kernel, signature, constexprs=values), target=GPUTarget("cuda", 90, 32))
print("added")
"""


def test_products_compile_for_hopper() -> None:
    forms = ["128,0,5,0", "128,1,1,0", "192,0,4,0", "192,0,4,1", "192,1,1,0", "192,0,1,0", "64,0,1,0", "320,0,2,0"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-c", COMPILED, *forms], capture_output=True, text=True, timeout=300, env=environment
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.split() == [*forms, "added"]
