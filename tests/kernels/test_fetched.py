"""Weights that are fetched before the launch before has ended: how many bytes of them, and when. Nothing is run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.kernels.quantised import Kind, Quantised, quantise

pytest.importorskip("triton")
pytest.importorskip("triton.backends.nvidia")
from outrider.kernels.gpu import held, launch, wide
from outrider.kernels.gpu.sums import operand


@given(st.integers(1, 300), st.integers(0, 5000), st.integers(0, 17), st.sampled_from([torch.bfloat16, torch.int16]))
def test_bytes_of_a_row(width: int, ahead: int, first: int, dtype: torch.dtype) -> None:
    """Whole pieces of 16, and never beyond its end: what follows the last row may be nobody's memory."""
    whole = torch.zeros(3, width + first, dtype=dtype)
    for weight in (whole, whole[:, first:]):
        found = launch.bytes_ahead(weight, ahead)
        assert found % 16 == 0
        assert 0 <= found <= min(ahead, 2 * weight.shape[1])
    fits = whole.shape[1] % 8 == 0 and whole.data_ptr() % 16 == 0
    assert launch.bytes_ahead(whole, 2**20) == (2 * whole.shape[1] // 16 * 16 if fits else 0)


def _int4(num_runs: int) -> Quantised:
    found = quantise(torch.randn(64, 128 * num_runs), Kind.INT4)
    assert found is not None
    return found


@pytest.mark.parametrize("num_runs", [1, 2, 3, 5, 8, 112])
def test_bytes_of_a_part(num_runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that several programs share, each fetches of its own part."""
    monkeypatch.setattr(launch, "AHEAD", 1024)
    form = operand(_int4(num_runs))
    for split in (1, 2, 4):
        share, found = -(-num_runs // split), wide._bytes_ahead(form, split)
        assert found <= 1024
        for number in range(split):
            begin, end = number * share, min((number + 1) * share, num_runs)
            assert found <= 64 * max(end - begin, 0)
        assert found or split > 1


@pytest.mark.parametrize("num_runs", [1, 8, 16, 17, 32, 112])
@pytest.mark.parametrize("tile", [held.Tile(1, 4, 4), held.Tile(1, 8, 2), held.Tile(1, 4, 8), held.Tile(4, 4, 2)])
def test_bytes_behind_those_that_are_asked_for(num_runs: int, tile: held.Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    data = _int4(num_runs).data
    assert held._bytes_ahead(data, tile, 1) == 0
    for ahead in (1, 512, 10_000):
        monkeypatch.setattr(launch, "AHEAD", ahead)
        found, asked = held._bytes_ahead(data, tile, 1), 64 * tile.warps * tile.stages
        assert found % (4 * tile.warps * 16) == 0, "each lane's piece is whole"
        assert not found or asked + found <= 64 * num_runs
        assert found <= ahead


KERNELS = """
import sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from outrider.kernels.gpu import held, linear, normed, rope, sliced, wide

FEW_BITS = dict(KIND=0, PART=32, GROUP=128, BLOCK_M=16)
SHARED = dict(EVEN=True, BLOCK_N=32, EARLY=True, FAST=True)
KERNELS = {
    rope._rope_write: dict(HEADS=1, BLOCK_HALF=32, BLOCK_REST=1, BLOCK_VALUE=64, SOON=512, FETCHED=32),
    linear._linear: dict(GATED=1, BLOCK_M=16, BLOCK_K=128, AHEAD=512),
    sliced._linear: dict(KIND=5, PART=128, GROUP=0, BLOCK_M=8, SLICES=4, STAGES=3, GATED=1, AHEAD=512),
    normed._normed_linear: dict(KIND=5, PART=128, BLOCK_M=8, SLICES=4, STAGES=3, TWO=True, GATE=1, AHEAD=512),
    wide._wide: dict(**FEW_BITS, SPLIT=1, STAGES=3, GATED=1, AHEAD=512),
    held._held: dict(RAISE=17.0, ROWS=8, TILES=2, WARPS=4, STAGES=2, GATED=1, AHEAD=512),
}
NUMBERS = {"eps", "v_eps", "v_offset", "key_inverse", "value_inverse"}
for kernel, constants in KERNELS.items():
    names, is_rope, is_held = kernel.arg_names, kernel is rope._rope_write, kernel is held._held
    constants = SHARED | constants | ({} if "BLOCK_N" in names else {"BLOCK_N": 0})
    constants = {name: constants.get(name, False) for name in names if name.isupper()}
    types = dict.fromkeys(("x", "weight", "bias", "residual", "out", "q", "k", "v", "k_pages", "v_pages"), "*bf16")
    types |= dict.fromkeys(("q_weight", "k_weight", "v_weight", "soon"), "*bf16") | {"locations": "*i64"}
    types |= dict.fromkeys(("cos", "sin", "scale", "offset"), "*fp32") | dict.fromkeys(NUMBERS, "fp32")
    types |= {"data": "*i32" if is_held else "*bf16" if constants.get("KIND") == 5 else "*i16"}
    types |= {"offset": "fp32"} if is_rope else {}
    types |= dict.fromkeys(("norm_offset", "alpha", "limit"), "fp32") | {"norm": "*fp32"}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    is_whole = [name for name in names if name not in constants and signature[name] != "fp32" and name != "num_rows"]
    hints = {(names.index(name),): [["tt.divisibility", 16]] for name in is_whole}
    source = (GluonASTSource if is_held else ASTSource)(kernel, signature, values, hints)
    code = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    before = code if is_rope else code.split("griddepcontrol.wait", 1)[0]  # there, some programs do nothing else
    print(kernel.__module__.rpartition(".")[2], before.count("cp.async.bulk.prefetch.L2"))
"""


def test_they_are_fetched_before_the_wait() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, "-c", KERNELS], capture_output=True, text=True, timeout=300, env=environment
    )
    assert found.returncode == 0, found.stderr[-2000:]
    counts = dict(line.split() for line in found.stdout.splitlines())
    assert list(counts) == ["rope", "linear", "sliced", "normed", "wide", "held"]
    assert all(int(count) > 0 for count in counts.values()), counts
