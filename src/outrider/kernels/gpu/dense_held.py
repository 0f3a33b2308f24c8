"""y = x W^T for up to eight rows, and weights of 16 bits, in Gluon: the first weights are asked for before the input is
there. For one row they all go straight into registers: a program has few outputs and all of their inputs, so there are
many programs, and no multiprocessor is left with more than its share, which counts for matrices of 5 to 100 MB."""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.ampere.async_copy import commit_group, wait_group
from triton.language.extra import cuda

from outrider.kernels.gpu import gates, launch
from outrider.kernels.gpu.epilogue import beside, finish

async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # so in Triton 3.6
MOST_ROWS = 8
SHORT, MEDIUM = 8, 10  # requests of a lane for an output's inputs
LONG = 8192  # inputs: more warps share them
SEVERAL = 4096  # inputs from which rounds of several rows were slower with it (Llama-3.1-8B), or no faster
PROCESSORS = 132  # of an H200
PLACES = gl.constexpr(8)  # neighbours that a lane asks for at once: 16 bytes


@dataclass(frozen=True)
class Spread:
    """How one row's product is spread over the warps of a program."""

    outputs: int  # of a warp; with a gate, as many ups
    beside: int  # warps with outputs of their own
    sharing: int  # warps that share outputs


@dataclass(frozen=True)
class Tile:
    """How up to eight are, without a gate."""

    outputs: int  # of a program
    warps: int  # that share their inputs
    span: int  # neighbouring inputs of a warp
    stages: int  # steps that are on their way


@gluon.jit
def _one_row(
    x, weight, bias, residual, out, num_columns,
    INNER: gl.constexpr, GATED: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    OUTPUTS: gl.constexpr, BESIDE: gl.constexpr, SHARING: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Added up number by number. GATED, a gate's number: the weight's rows are gates, then ups."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([OUTPUTS, PLACES], [1, 32], [BESIDE, SHARING], [1, 0])
    HEIGHT: gl.constexpr = OUTPUTS * BESIDE
    STEP: gl.constexpr = PLACES * 32 * SHARING
    STEPS: gl.constexpr = (INNER + STEP - 1) // STEP
    column = gl.program_id(0) * HEIGHT + gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, LAYOUT))
    place = gl.arange(0, STEP, layout=gl.SliceLayout(0, LAYOUT))
    near = gl.minimum(column, num_columns - 1)  # a column that does not exist is computed, and not stored
    at = weight + near.to(gl.int64)[:, None] * INNER + place[None, :]
    up = gl.cast(num_columns, gl.int64) * INNER
    asked, ups = (), ()
    for step in gl.static_range(STEPS):
        there = (place + step * STEP < INNER)[None, :] if step >= INNER // STEP else True
        asked = asked + (gl.load(at + step * STEP, mask=there, other=0.0),)  # type: ignore[assignment] # noqa: RUF005
        if GATED:
            ups = ups + (gl.load(at + up + step * STEP, mask=there, other=0.0),)  # type: ignore[assignment] # noqa: RUF005
    if EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    fits = column < num_columns
    first_bias, second_bias, more = beside(
        bias, residual, column * 0, column, fits, num_columns, 0, GATED, HAS_BIAS, HAS_RESIDUAL
    )
    total = gl.zeros((HEIGHT, STEP), gl.float32, LAYOUT)
    second = total
    for step in gl.static_range(STEPS):
        there = place + step * STEP < INNER if step >= INNER // STEP else True
        value = gl.load(x + place + step * STEP, mask=there, other=0.0).to(gl.float32)[None, :]
        total = total + asked[step].to(gl.float32) * value
        if GATED:
            second = second + ups[step].to(gl.float32) * value
    total, second = gl.sum(total, 1), gl.sum(second, 1)
    finish(
        total, second, first_bias, second_bias, more, out, column * 0, column, fits, num_columns, GATED, HAS_BIAS,
        HAS_RESIDUAL,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["num_rows"])  # compiled once for any number
def _few_rows(
    x, weight, bias, residual, out, num_rows, num_columns, x_stride, residual_stride,
    INNER: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, OUTPUTS: gl.constexpr,
    WARPS: gl.constexpr, SPAN: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Up to eight rows, on tensor cores: outputs are M, rows N; warps share the inputs. Some steps are on their way to
    shared memory, the first weights before the input is there."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    LANES: gl.constexpr = SPAN // PLACES
    COPY: gl.constexpr = gl.BlockedLayout([1, 1, PLACES], [1, 32 // LANES, LANES], [WARPS, 1, 1], [2, 1, 0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(PLACES, 1, 8, [2, 1, 0])
    STEP: gl.constexpr = WARPS * SPAN
    STEPS: gl.constexpr = INNER // STEP
    kind: gl.constexpr = weight.dtype.element_ty
    begin = gl.program_id(0) * OUTPUTS
    part = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, COPY)))
    place = gl.arange(0, SPAN, layout=gl.SliceLayout(0, gl.SliceLayout(1, COPY)))
    line = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, gl.SliceLayout(2, COPY)))
    row = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, COPY)))
    across = part[:, None, None] * SPAN + place[None, None, :]
    near = gl.minimum(begin + line, num_columns - 1)  # a column that does not exist is computed, and not stored
    at = weight + near.to(gl.int64)[None, :, None] * INNER + across
    x_at = x + row.to(gl.int64)[None, :, None] * x_stride + across
    x_fits = (row < num_rows)[None, :, None] & (across >= 0)
    weights = gl.allocate_shared_memory(kind, [STAGES, WARPS, OUTPUTS, SPAN], SHARED)
    inputs = gl.allocate_shared_memory(kind, [STAGES, WARPS, 8, SPAN], SHARED)
    for step in gl.static_range(STAGES - 1):
        if step < STEPS:
            async_load(weights.index(step), at + step * STEP)
    if EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    for step in gl.static_range(STAGES - 1):
        if step < STEPS:
            async_load(inputs.index(step), x_at + step * STEP, mask=x_fits)
        commit_group()
    total = gl.zeros((WARPS, OUTPUTS, 8), gl.float32, SUMS)
    for step in range(STEPS):
        wait_group(STAGES - 2)
        ahead, free = step + STAGES - 1, (step + STAGES - 1) % STAGES
        here = step % STAGES
        value = inputs.index(here).permute((0, 2, 1)).load(RIGHT)
        total = mma_v2(weights.index(here).load(LEFT), value, total)
        if ahead < STEPS:
            async_load(weights.index(free), at + ahead * STEP)
            async_load(inputs.index(free), x_at + ahead * STEP, mask=x_fits)
        commit_group()
    total = gl.sum(total, 0)
    row = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(0, SUMS)))[None, :]
    column = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, gl.SliceLayout(0, SUMS)))[:, None] + begin
    fits = (row < num_rows) & (column < num_columns)
    first_bias, second_bias, more = beside(
        bias, residual, row, column, fits, num_columns, residual_stride, 0, HAS_BIAS, HAS_RESIDUAL
    )
    finish(total, total, first_bias, second_bias, more, out, row, column, fits, num_columns, 0, HAS_BIAS, HAS_RESIDUAL)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    gated: int = gates.NONE,
    out: Tensor | None = None,
    form: Spread | Tile | None = None,
) -> Tensor:
    """As gpu.linear.linear, for what fits()."""
    num_rows, inner = x.shape
    num_columns = len(weight) // (2 if gated else 1)
    out = x.new_empty(num_rows, num_columns) if out is None else out
    if not num_rows:
        return out
    form = form or form_for(num_rows, num_columns, inner, gated)
    assert form is not None, "see fits()"
    early = launch.early(x)
    if isinstance(form, Spread):
        _one_row[(triton.cdiv(num_columns, form.outputs * form.beside),)](
            x, weight, out if bias is None else bias, out if residual is None else residual, out, num_columns,
            INNER=inner, GATED=int(gated), HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
            OUTPUTS=form.outputs, BESIDE=form.beside, SHARING=form.sharing, EARLY=early,
            num_warps=form.beside * form.sharing, **launch.options(early),
        )  # fmt: skip
        return out
    assert not gated, "see form_for()"
    _few_rows[(triton.cdiv(num_columns, form.outputs),)](
        x, weight, out if bias is None else bias, out if residual is None else residual, out, num_rows, num_columns,
        x.stride(0), 0 if residual is None else residual.stride(0), INNER=inner, HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, OUTPUTS=form.outputs, WARPS=form.warps, SPAN=form.span, STAGES=form.stages,
        EARLY=early, num_warps=form.warps, **launch.options(early),
    )  # fmt: skip
    return out


def fits(x: Tensor, weight: Tensor, residual: Tensor | None = None, gated: int = gates.NONE) -> bool:
    """Few rows, and a weight whose rows divide into what is asked for at once, and lie as it is asked for."""
    if not 1 <= len(x) <= MOST_ROWS or x.dtype != weight.dtype or x.element_size() != 2:
        return False
    placed = x.stride(-1) == 1 and (len(x) == 1 or x.stride(0) % PLACES.value == 0) and x.data_ptr() % 16 == 0
    placed = placed and weight.is_contiguous() and weight.data_ptr() % 16 == 0 and weight.shape[1] % PLACES.value == 0
    if not placed or (residual is not None and residual.stride(-1) != 1):
        return False
    return form_for(len(x), len(weight) // (2 if gated else 1), weight.shape[1], gated) is not None


def form_for(num_rows: int, num_columns: int, inner: int, gated: int) -> Spread | Tile | None:
    """Measured on an H200 (scripts/h200/dense.py). None: it is not faster."""
    if num_rows > 1:
        num_programs = triton.cdiv(num_columns, 16)
        tile = Tile(16, 4, 128, 4 if num_programs <= 2 * PROCESSORS else 3)  # as many fit on a multiprocessor
        step = tile.warps * tile.span
        is_short = 2 * step <= inner < SEVERAL and inner % step == 0
        return tile if is_short and not gated and num_programs <= 3 * PROCESSORS else None
    most = SHORT if gated or inner >= LONG else MEDIUM
    for sharing in (1, 2, 4, 8):
        steps = triton.cdiv(inner, PLACES.value * 32 * sharing)
        if steps <= most or (sharing == 8 and steps <= (MEDIUM if gated else 2 * MEDIUM)):
            return Spread(1 if gated or steps > MEDIUM else 2, max(4 // sharing, 1), sharing)
    return None
