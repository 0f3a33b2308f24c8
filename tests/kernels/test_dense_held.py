"""Products of few rows whose 16-bit weights go straight into registers, in numpy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_triton import CUDA
from test_triton_quantised import DEVICE

pytest.importorskip("triton.experimental.gluon.language.nvidia.ampere")

from gluon_words import Kernel

from outrider.kernels.activation import gelu_tanh_mul, silu_mul
from outrider.kernels.gpu import dense_held, epilogue, gates
from outrider.kernels.gpu.dense_held import Spread, Tile

KIND = torch.bfloat16 if CUDA else torch.float32


@pytest.fixture(autouse=True)
def anywhere() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not CUDA:
            for name in ("_one_row", "_few_rows"):
                patch.setattr(dense_held, name, Kernel(name, gates, epilogue, dense_held))
        yield


def compare(rows: int, columns: int, inner: int, form: Spread | Tile | None, *, gated: int = 0, has_bias: bool = False,
            has_residual: bool = False) -> None:  # fmt: skip
    torch.manual_seed(rows)
    weight = (torch.randn(columns * (2 if gated else 1), inner, device=DEVICE) * inner**-0.5).to(KIND)
    x = torch.randn(rows, inner, device=DEVICE).to(KIND)
    bias = torch.randn(len(weight), device=DEVICE).to(KIND) if has_bias else None
    residual = torch.randn(rows, columns, device=DEVICE).to(KIND) if has_residual else None
    found = dense_held.linear(x, weight, bias, residual, gated=gated, form=form)
    wanted = x.float() @ weight.float().T + (0 if bias is None else bias.float())
    if gated:
        wanted = (silu_mul if gated == gates.SILU else gelu_tanh_mul)(wanted)
    wanted += 0 if residual is None else residual.float()
    error = (found.float() - wanted).abs().max() / wanted.abs().max()
    assert error < (2e-2 if CUDA else 1e-5), error


@pytest.mark.parametrize("form", [Spread(1, 4, 1), Spread(2, 2, 2), Spread(4, 1, 4)])
def test_one_row(form: Spread) -> None:
    compare(1, 64, 2048, form)
    compare(1, 52, 1024, form, has_bias=True, has_residual=True)
    compare(1, 48, 1024, form, gated=gates.SILU, has_bias=True)
    compare(1, 50, 1024, form, gated=gates.GELU)


@pytest.mark.parametrize("gated", [gates.NONE, gates.SILU])
@pytest.mark.parametrize("inner", [8, 256, 2048, 2560, 2568, 4096, 6912, 8192, 10240, 14336])
def test_the_form_that_is_chosen(inner: int, gated: int) -> None:
    compare(1, 37, inner, None, gated=gated, has_residual=not gated)


@pytest.mark.parametrize("rows", [2, 7])
@pytest.mark.parametrize(("columns", "inner"), [(40, 1024), (40, 2560), (4240, 1024)])
def test_the_tile_that_is_chosen(columns: int, inner: int, rows: int) -> None:
    compare(rows, columns, inner, None, has_bias=True)


@given(inner=st.integers(1, 200).map(lambda n: n * 128), gated=st.sampled_from([gates.NONE, gates.SILU]))
def test_forms_have_room_in_registers(inner: int, gated: int) -> None:
    form = dense_held.form_for(1, 4096, inner, gated)
    assert isinstance(form, Spread) or inner > 2048 * 10
    if isinstance(form, Spread):
        steps = -(-inner // (256 * form.sharing))
        assert steps * form.outputs * (2 if gated else 1) <= 20  # requests of a lane, four registers each
        assert 4 <= form.beside * form.sharing <= 8


def test_what_does_not_fit() -> None:
    weight, x = torch.zeros(64, 2048, dtype=torch.bfloat16), torch.zeros(1, 2048, dtype=torch.bfloat16)
    assert dense_held.fits(x, weight)
    assert dense_held.fits(x.half(), weight.half())
    assert not dense_held.fits(x.float(), weight.float())
    assert not dense_held.fits(x.half(), weight)
    assert dense_held.fits(torch.zeros(8, 2048, dtype=torch.bfloat16), weight)
    assert not dense_held.fits(torch.zeros(9, 2048, dtype=torch.bfloat16), weight)
    assert not dense_held.fits(torch.zeros(2, 2056, dtype=torch.bfloat16)[:, 4:-4], weight)
    for columns, inner in ((64, 2304), (64, 512), (64, 4096), (8192, 1024)):
        few = torch.zeros(2, inner, dtype=torch.bfloat16)
        assert not dense_held.fits(few, torch.zeros(columns, inner, dtype=torch.bfloat16))
    assert not dense_held.fits(torch.zeros(1, 2056, dtype=torch.bfloat16)[:, 4:-4], weight)  # 8 bytes off
    assert not dense_held.fits(x, torch.zeros(64, 4096, dtype=torch.bfloat16)[:, :2048])
    assert not dense_held.fits(x[:, :580], torch.zeros(64, 580, dtype=torch.bfloat16))
    assert not dense_held.fits(x, weight, torch.zeros(1, 128, dtype=torch.bfloat16)[:, ::2])


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("form", [Tile(16, 4, 128, 2), Tile(16, 2, 128, 3), Tile(32, 4, 64, 2)])
def test_few_rows(form: Tile, rows: int) -> None:
    compare(rows, 64, 2048, form)
    compare(rows, 40, 1024, form, has_bias=True, has_residual=True)
