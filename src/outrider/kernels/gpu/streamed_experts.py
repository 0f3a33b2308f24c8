"""A mixture's experts for up to eight rows, in 16 bits, in Gluon: few programs, each of which reads one part of the
chosen experts after the other without a pause, as the next ones are on their way to shared memory before one has ended.
On the way down a program has some columns of all experts, so that nothing is left to add up."""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.ampere.async_copy import commit_group, wait_group
from triton.language.extra import cuda

from outrider.kernels.gpu import gates, launch
from outrider.kernels.gpu.choice import expert_of, pair_of, ranked
from outrider.kernels.gpu.dense_held import PLACES, async_load
from outrider.kernels.gpu.gates import activated
from outrider.kernels.gpu.hopper import num_processors

MOST_ROWS, MOST_CHOSEN = 8, 16
HEIGHT = gl.constexpr(16)  # lines of a matrix that a program multiplies at a time: the M of a product
MAX_SHARED = 200 * 2**10  # bytes of a program's buffers
MOST_STEPS = 16  # of an expert's line, each of which is instructions of its own


@dataclass(frozen=True)
class Tile:
    warps: int  # that share the inputs
    span: int  # neighbouring inputs of a warp
    stages: int  # steps that are on their way
    beside: int = 1  # programs of a multiprocessor, on the way up


UP, DOWN = Tile(4, 128, 6), Tile(4, 64, 8)  # as measured on an H200 (scripts/h200/experts.py)


@gluon.jit
def _shares_of(shares, ids, expert, row, num_rows, kind: gl.constexpr, CHOSEN: gl.constexpr):
    """Each row's share of this expert, which may be none, rounded as the reference does."""
    pair = pair_of(ids, expert, row, num_rows, CHOSEN)
    return gl.load(shares + gl.maximum(pair, 0), mask=pair >= 0, other=0.0).to(kind).to(gl.float32)


@gluon.jit
def _ask(to, at, exists, across, INNER: gl.constexpr, SHIFT: gl.constexpr):
    """For a step's numbers, from SHIFT on; where there are none they are nought."""
    async_load(to, at + SHIFT, mask=exists & (across + SHIFT < INNER))


@gluon.jit
def _ask_rows(to, x, row, x_stride, across, INNER: gl.constexpr, SHIFT: gl.constexpr):
    """For a step's numbers of rows of x; of row -1 they are nought."""
    at = x + gl.maximum(row, 0).to(gl.int64)[None, :, None] * x_stride + across
    _ask(to, at, (row >= 0)[None, :, None], across, INNER, SHIFT)


@gluon.jit(do_not_specialize=["num_pairs"])  # compiled once for any number
def _up(
    x, weight, bias, ids, out, num_pairs, num_columns, x_stride, alpha, limit,
    INNER: gl.constexpr, CHOSEN: gl.constexpr, PAIRS: gl.constexpr, GATE: gl.constexpr, TWO: gl.constexpr,
    HAS_BIAS: gl.constexpr, WARPS: gl.constexpr, SPAN: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """What each pair's expert makes of its row, by items of some columns of an expert: every so many-th is a program's.
    TWO: half of an item's lines are gates, the others ups."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    LANES: gl.constexpr = SPAN // PLACES
    COPY: gl.constexpr = gl.BlockedLayout([1, 1, PLACES], [1, 32 // LANES, LANES], [WARPS, 1, 1], [2, 1, 0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(PLACES, 1, 8, [2, 1, 0])
    LAST: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, WARPS], [0, 1])
    STEP: gl.constexpr = WARPS * SPAN
    STEPS: gl.constexpr = (INNER + STEP - 1) // STEP
    BEFORE: gl.constexpr = (STAGES + STEPS - 2) // STEPS  # items that are asked for before one has ended, at most
    WIDTH: gl.constexpr = HEIGHT // 2 if TWO else HEIGHT  # columns of an item
    kind: gl.constexpr = weight.dtype.element_ty
    part = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, COPY)))
    place = gl.arange(0, SPAN, layout=gl.SliceLayout(0, gl.SliceLayout(1, COPY)))
    line = gl.arange(0, HEIGHT, layout=gl.SliceLayout(0, gl.SliceLayout(2, COPY)))
    x_row = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, COPY)))
    across = part[:, None, None] * SPAN + place[None, None, :]
    line = line // WIDTH * num_columns + line % WIDTH
    weight_at, exists = weight + line[None, :, None] * INNER + across, (line >= 0)[None, :, None]
    weights = gl.allocate_shared_memory(kind, [STAGES, WARPS, HEIGHT, SPAN], SHARED)
    inputs = gl.allocate_shared_memory(kind, [STEPS, WARPS, 8, SPAN], SHARED)
    row = gl.arange(0, 8, layout=gl.SliceLayout(0, LAST))
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(1, LAST))
    num_rows, num_tiles = num_pairs // CHOSEN, num_columns // WIDTH
    height = num_columns * (2 if TWO else 1)
    if EARLY:
        cuda.gdc_wait()
    id, rank = ranked(ids, num_pairs, PAIRS, WARPS)
    num_items = (gl.max(rank, 0) + 1) * num_tiles
    item, many = gl.program_id(0), gl.num_programs(0)
    x_row = gl.where(x_row < num_rows, x_row, -1)
    for step in gl.static_range(STEPS):
        _ask_rows(inputs.index(step), x, x_row, x_stride, across, INNER, step * STEP)
    commit_group()
    starts, experts, pairs = (), (), ()  # of this item, and of those behind it
    for number in gl.static_range(BEFORE + 1):
        ahead = item + number * many
        expert = expert_of(id, rank, ahead // num_tiles)
        starts = starts + ((expert * height + ahead % num_tiles * WIDTH) * INNER,)  # type: ignore[assignment] # noqa: RUF005
        experts = experts + (expert,)  # type: ignore[assignment] # noqa: RUF005
        pairs = pairs + (pair_of(ids, expert, row, num_rows, CHOSEN),)  # type: ignore[assignment] # noqa: RUF005
    for stage in gl.static_range(STAGES - 1):
        if item + stage // STEPS * many < num_items:
            at = weight_at + starts[stage // STEPS]
            _ask(weights.index(stage), at, exists, across, INNER, stage % STEPS * STEP)
        commit_group()
    here = 0
    while item < num_items:
        total = gl.zeros((WARPS, HEIGHT, 8), gl.float32, SUMS)
        for step in gl.static_range(STEPS):
            wait_group(STAGES - 2)
            value = inputs.index(step).permute((0, 2, 1)).load(RIGHT)
            total = mma_v2(weights.index(here).load(LEFT), value, total)
            free = here + STAGES - 1
            free = free - STAGES if free >= STAGES else free
            if item + (step + STAGES - 1) // STEPS * many < num_items:
                at = weight_at + starts[(step + STAGES - 1) // STEPS]
                _ask(weights.index(free), at, exists, across, INNER, (step + STAGES - 1) % STEPS * STEP)
            commit_group()
            here = here + 1 if here + 1 < STAGES else 0
        sums = gl.sum(total, 0)
        if TWO:
            first, second = gl.split(gl.permute(gl.reshape(sums, (2, WIDTH, 8)), (1, 2, 0)))
            first, second = gl.convert_layout(first, LAST), gl.convert_layout(second, LAST)
        else:
            first = gl.convert_layout(sums, LAST)
            second = first
        expert, pair, own = experts[0], pairs[0], item % num_tiles * WIDTH + column  # type: ignore[misc]
        if HAS_BIAS:
            first += gl.load(bias + expert * height + own).to(gl.float32)[:, None]
            if TWO:
                second += gl.load(bias + expert * height + num_columns + own).to(gl.float32)[:, None]
        result = activated(first, second, alpha, limit, GATE, kind).to(kind)
        gl.store(out + pair.to(gl.int64)[None, :] * num_columns + own[:, None], result, mask=(pair >= 0)[None, :])
        item += many
        ahead = item + BEFORE * many
        expert = expert_of(id, rank, ahead // num_tiles)
        starts = starts[1:] + ((expert * height + ahead % num_tiles * WIDTH) * INNER,)  # type: ignore[assignment] # noqa: RUF005
        experts = experts[1:] + (expert,)  # type: ignore[assignment] # noqa: RUF005
        pairs = pairs[1:] + (pair_of(ids, expert, row, num_rows, CHOSEN),)  # type: ignore[assignment] # noqa: RUF005
    if EARLY:  # behind all that is read: the next launch's first weights would take their part of the bandwidth
        cuda.gdc_launch_dependents()


@gluon.jit(do_not_specialize=["num_pairs"])
def _down(
    x, weight, bias, ids, shares, residual, out, num_pairs, num_columns, x_stride, residual_stride,
    INNER: gl.constexpr, CHOSEN: gl.constexpr, PAIRS: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    WARPS: gl.constexpr, SPAN: gl.constexpr, STAGES: gl.constexpr, KNOWN: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Some columns of each row: the sum of its experts' answers by their shares. KNOWN: ids and shares were there
    before the launch before this one began."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    LANES: gl.constexpr = SPAN // PLACES
    COPY: gl.constexpr = gl.BlockedLayout([1, 1, PLACES], [1, 32 // LANES, LANES], [WARPS, 1, 1], [2, 1, 0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(PLACES, 1, 8, [2, 1, 0])
    STEP: gl.constexpr = WARPS * SPAN
    STEPS: gl.constexpr = (INNER + STEP - 1) // STEP
    BEFORE: gl.constexpr = (STAGES + STEPS - 2) // STEPS
    kind: gl.constexpr = weight.dtype.element_ty
    begin = gl.program_id(0) * HEIGHT
    part = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, COPY)))
    place = gl.arange(0, SPAN, layout=gl.SliceLayout(0, gl.SliceLayout(1, COPY)))
    line = gl.arange(0, HEIGHT, layout=gl.SliceLayout(0, gl.SliceLayout(2, COPY))) + begin
    x_row = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, COPY)))
    across = part[:, None, None] * SPAN + place[None, None, :]
    weight_at, exists = weight + line[None, :, None] * INNER + across, (line >= 0)[None, :, None]
    weights = gl.allocate_shared_memory(kind, [STAGES, WARPS, HEIGHT, SPAN], SHARED)
    inputs = gl.allocate_shared_memory(kind, [STAGES, WARPS, 8, SPAN], SHARED)
    lane = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, SUMS)))
    row = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(0, SUMS)))
    column = gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, gl.SliceLayout(0, SUMS))) + begin
    num_rows = num_pairs // CHOSEN
    size = gl.cast(num_columns, gl.int64) * INNER
    if EARLY and not KNOWN:
        cuda.gdc_wait()
    id, rank = ranked(ids, num_pairs, PAIRS, WARPS)
    count = gl.max(rank, 0) + 1
    experts, pairs, parts = (), (), ()  # of this expert, and of those behind it
    for number in gl.static_range(BEFORE + 1):
        expert = expert_of(id, rank, number)
        experts = experts + (expert,)  # type: ignore[assignment] # noqa: RUF005
        pairs = pairs + (pair_of(ids, expert, x_row, num_rows, CHOSEN),)  # type: ignore[assignment] # noqa: RUF005
        parts = parts + (_shares_of(shares, ids, expert, lane, num_rows, kind, CHOSEN),)  # type: ignore[assignment] # noqa: RUF005
    for stage in gl.static_range(STAGES - 1):
        if stage // STEPS < count:
            at = weight_at + experts[stage // STEPS] * size
            _ask(weights.index(stage), at, exists, across, INNER, stage % STEPS * STEP)
    if EARLY and KNOWN:
        cuda.gdc_wait()
    for stage in gl.static_range(STAGES - 1):
        if stage // STEPS < count:
            _ask_rows(inputs.index(stage), x, pairs[stage // STEPS], x_stride, across, INNER, stage % STEPS * STEP)
        commit_group()
    total = gl.zeros((WARPS, HEIGHT, 8), gl.float32, SUMS)
    biases = gl.zeros((HEIGHT, 8), gl.float32, gl.SliceLayout(0, SUMS))
    row_fits = (row < num_rows)[None, :]
    if HAS_RESIDUAL:
        more_at = residual + row.to(gl.int64)[None, :] * residual_stride + column[:, None]
        more = gl.load(more_at, mask=row_fits, other=0.0).to(gl.float32)
    here, number = 0, 0
    while number < count:
        sums = gl.zeros((WARPS, HEIGHT, 8), gl.float32, SUMS)
        if EARLY and number == count - 1:
            cuda.gdc_launch_dependents()
        for step in gl.static_range(STEPS):
            wait_group(STAGES - 2)
            value = inputs.index(here).permute((0, 2, 1)).load(RIGHT)
            sums = mma_v2(weights.index(here).load(LEFT), value, sums)
            free = here + STAGES - 1
            free = free - STAGES if free >= STAGES else free
            if number + (step + STAGES - 1) // STEPS < count:
                at = weight_at + experts[(step + STAGES - 1) // STEPS] * size
                _ask(weights.index(free), at, exists, across, INNER, (step + STAGES - 1) % STEPS * STEP)
                _ask_rows(
                    inputs.index(free), x, pairs[(step + STAGES - 1) // STEPS], x_stride, across, INNER,
                    (step + STAGES - 1) % STEPS * STEP,
                )  # fmt: skip
            commit_group()
            here = here + 1 if here + 1 < STAGES else 0
        total += sums * parts[0][None, None, :]  # type: ignore[misc]
        if HAS_BIAS:
            now = experts[0]  # type: ignore[misc]
            share = _shares_of(shares, ids, now, row, num_rows, kind, CHOSEN)
            biases += gl.load(bias + now * num_columns + column).to(gl.float32)[:, None] * share[None, :]
        number += 1
        expert = expert_of(id, rank, number + BEFORE)
        experts = experts[1:] + (expert,)  # type: ignore[assignment] # noqa: RUF005
        pairs = pairs[1:] + (pair_of(ids, expert, x_row, num_rows, CHOSEN),)  # type: ignore[assignment] # noqa: RUF005
        parts = parts[1:] + (_shares_of(shares, ids, expert, lane, num_rows, kind, CHOSEN),)  # type: ignore[assignment] # noqa: RUF005
    value = gl.sum(total, 0) + biases
    if HAS_RESIDUAL:
        value = value.to(kind).to(gl.float32) + more
    gl.store(out + row.to(gl.int64)[None, :] * num_columns + column[:, None], value.to(kind), mask=row_fits)


def fits(x: Tensor, ids: Tensor, weight: Tensor, gate: int) -> bool:
    """Few rows, and weights of 16 bits that lie as they are asked for."""
    num_columns, inner = weight.shape[1] // (2 if gates.has_two(gate) else 1), weight.shape[2]
    rows_fit = len(ids) <= MOST_ROWS and ids.shape[1] <= MOST_CHOSEN and x.dtype == weight.dtype
    rows_fit = rows_fit and x.stride(-1) == 1 and x.stride(0) % PLACES.value == 0 and x.data_ptr() % 16 == 0
    whole = num_columns % HEIGHT.value == 0 and inner % PLACES.value == 0 and num_columns * inner * 2 < 2**31
    placed = weight.is_contiguous() and weight.data_ptr() % 16 == 0 and weight.element_size() == 2
    is_short = max(num_steps(tile, inner) for tile in (UP, DOWN)) <= MOST_STEPS
    return rows_fit and whole and placed and is_short and shared_bytes(UP, inner) <= MAX_SHARED


def num_steps(tile: Tile, inner: int) -> int:
    return triton.cdiv(inner, tile.warps * tile.span)


def shared_bytes(tile: Tile, inner: int) -> int:
    """Of a program on the way up, which keeps its rows."""
    return 2 * tile.warps * tile.span * (tile.stages * HEIGHT.value + num_steps(tile, inner) * MOST_ROWS)


def up(
    x: Tensor,
    ids: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gate: tuple[int, float, float],
    tile: Tile | None = None,
) -> Tensor:
    """x [T, H], ids [T, k], weight [E, I or 2 I, H], a gate's number and what clamps it -> [T * k, I]: what each pair's
    expert makes of its row."""
    number, alpha, limit = gate
    num_columns = weight.shape[1] // (2 if gates.has_two(number) else 1)
    out, early = x.new_empty(ids.numel(), num_columns), launch.early(x)
    tile = tile or UP
    _up[(tile.beside * num_processors(x.device),)](
        x, weight, out if bias is None else bias, ids, out, ids.numel(), num_columns, x.stride(0), alpha, limit,
        INNER=x.shape[1], CHOSEN=ids.shape[1], PAIRS=_pairs(ids), GATE=number, TWO=gates.has_two(number),
        HAS_BIAS=bias is not None, WARPS=tile.warps, SPAN=tile.span, STAGES=tile.stages, EARLY=early,
        num_warps=tile.warps, **launch.options(early),
    )  # fmt: skip
    return out


def down(
    x: Tensor,
    ids: Tensor,
    shares: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    tile: Tile | None = None,
    *,
    is_known: bool = False,
) -> Tensor:
    """x [T * k, I], ids and shares [T, k], weight [E, N, I] -> [T, N]: the weighed sum of each row's experts, plus the
    residual. `is_known`: ids and shares were made two launches before this one, or more."""
    num_columns, inner = weight.shape[1:]
    out, early = x.new_empty(len(ids), num_columns), launch.early(x)
    tile = tile or DOWN
    _down[(num_columns // HEIGHT.value,)](
        x, weight, out if bias is None else bias, ids, shares, out if residual is None else residual, out, ids.numel(),
        num_columns, x.stride(0), 0 if residual is None else residual.stride(0), INNER=inner, CHOSEN=ids.shape[1],
        PAIRS=_pairs(ids), HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, WARPS=tile.warps,
        SPAN=tile.span, STAGES=tile.stages, KNOWN=is_known, EARLY=early, num_warps=tile.warps,
        **launch.options(early),
    )  # fmt: skip
    return out


def _pairs(ids: Tensor) -> int:
    return max(triton.next_power_of_2(ids.numel()), 32)
