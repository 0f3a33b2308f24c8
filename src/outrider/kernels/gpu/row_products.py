"""y = x W^T in 16 bits for 33 to 320 rows on Hopper (H100, H200), in Gluon: decoding for many requests, or judging the
drafts of some, where a product should take as long as reading its weights. A weight's rows are the M of wgmma and the
input's rows its N, so that all of them share one tile: each weight is read once. A warp brings tiles of both with the
copy engine (TMA) into a ring of shared memory while two warpgroups multiply. Where outputs are few, several programs
share the inputs of one (split K), and a second launch adds up their sums in their order, or they exchange them."""

from __future__ import annotations

from dataclasses import dataclass
from operator import contains
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra import cuda

from outrider.kernels.gpu import gates, launch
from outrider.kernels.gpu.epilogue import beside, finish
from outrider.kernels.gpu.gates import activated
from outrider.kernels.gpu.hopper import num_processors
from outrider.kernels.gpu.product_parts import counters_for
from outrider.kernels.gpu.row_exchange import exchange

BLOCK = gl.constexpr(64)  # outputs of a product: the M of wgmma
DEPTH = gl.constexpr(64)  # inputs of a step: 128 bytes, as far as the swizzle reaches
MIN_ROWS, MAX_ROWS = 33, 320
MAX_SUMS = 192  # registers of a thread for sums
MAX_SHARED = 218 * 2**10  # bytes of a program's ring; results on their way out have 8 KiB beside it
MAX_STAGES = 6
ADDED_ROWS, ADDED_COLUMNS = 32, 64  # whose sums a program adds up
MAX_SPLIT = 8
MIN_STEPS = 6  # of a part: shorter ones are not worth their sums
RESIDENT_ROWS = 256  # with more, a weight may just have been widened: it is not read before the launch before has ended
# Gated or not, rows, outputs, inputs: where it was faster than cuBLAS on an H200 (scripts/h200/products.py, 2026-11-17
# in docs/diary.md). Elsewhere it was slower, as fast within the copy that addmm_ saves, or not measured.
ANY = 2**30
FASTER = (
    (True, range(33, 193), range(20480, ANY), range(2560, ANY)),  # Llama-3.1-8B, Qwen3-8B, Gemma-3-4B: 0.74 to 0.98
    (True, range(193, 321), range(28672, ANY), range(4096, ANY)),  # Llama-3.1-8B: 0.91 to 0.93
    (False, range(161, 193), range(4096, 4097), range(12288, 12289)),  # Qwen3-8B's way down: 0.72
)
copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # Triton 3.6 calls it the latter


@dataclass(frozen=True)
class Tile:
    blocks: int  # of 64 outputs, for each of two warpgroups; a gate's product has one of gates and one of ups
    stages: int
    split: int = 1  # programs that share an output's inputs
    joined: bool = False  # which exchange their sums (row_exchange.py), and need no second launch


@gluon.jit
def _piece(number, num_steps, split):
    """Which outputs a piece of work is about, which part of their inputs, and its steps."""
    part = number % split
    return number // split, part, part * num_steps // split, (part + 1) * num_steps // split


@gluon.jit
def _bring_weights(
    weights, weight_at, ready, tile, step, stage, num_columns, num_bytes: gl.constexpr, GATED: gl.constexpr,
    BLOCKS: gl.constexpr,
):  # fmt: skip
    """A step's weights; the barrier waits for its rows of the input as well."""
    mbarrier.expect(ready.index(stage), num_bytes)
    for number in gl.static_range(2 * BLOCKS):
        if GATED:
            first = (tile * 2 + number // 2) * BLOCK + number % 2 * num_columns
        else:
            first = (tile * 2 * BLOCKS + number) * BLOCK
        copy(weights, [first, step * DEPTH], ready.index(stage), weight_at.index(stage * (2 * BLOCKS) + number))


@gluon.jit
def _bring(
    weights, rows, more_rows, weight_at, row_at, more_at, ready, free, num_pieces, num_steps, split, num_columns,
    GATED: gl.constexpr, ROWS: gl.constexpr, MORE: gl.constexpr, BLOCKS: gl.constexpr,
    STAGES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The copying warp. The launch before this one may still be at work: what it makes is not needed for weights."""
    num_bytes: gl.constexpr = (2 * BLOCKS * BLOCK + ROWS + MORE) * DEPTH * 2
    tile, _part, begin, end = _piece(gl.program_id(0), num_steps, split)
    ahead = gl.minimum(end - begin, STAGES)
    for stage in range(ahead):
        _bring_weights(weights, weight_at, ready, tile, begin + stage, stage, num_columns, num_bytes, GATED, BLOCKS)
    if EARLY:
        cuda.gdc_wait()
    turn = 0
    for piece in range(gl.program_id(0), num_pieces, gl.num_programs(0)):
        tile, _part, begin, end = _piece(piece, num_steps, split)
        for step in range(begin, end):
            stage = turn % STAGES
            if turn >= ahead:
                mbarrier.wait(free.index(stage), (turn // STAGES & 1) ^ 1)
                _bring_weights(weights, weight_at, ready, tile, step, stage, num_columns, num_bytes, GATED, BLOCKS)
            copy(rows, [0, step * DEPTH], ready.index(stage), row_at.index(stage))
            if MORE > 0:
                copy(more_rows, [ROWS, step * DEPTH], ready.index(stage), more_at.index(stage))
            turn += 1
    if EARLY:
        cuda.gdc_launch_dependents()


@gluon.jit
def _leave(
    total, second, out, residual, column, first_row, part, num_rows, num_columns, residual_stride, begin, end,
    GATED: gl.constexpr, SUMS: gl.constexpr, JOINED: gl.constexpr, RESIDUAL: gl.constexpr,
):  # fmt: skip
    """Stores sums [BLOCK outputs, rows] as they are, SUMS of them for each output; or as the result, of some eights of
    rows if they are JOINED."""
    NUM_ROWS: gl.constexpr = total.shape[1]
    if SUMS > 0:
        layout: gl.constexpr = total.type.layout
        row = first_row + gl.arange(0, NUM_ROWS, layout=gl.SliceLayout(0, layout))[None, :]
        column = column + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, layout))[:, None]
        at = (part * num_columns + column).to(gl.int64) * SUMS + row
        gl.store(out + at, total, mask=column < num_columns)
    else:
        STORED: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
        kind: gl.constexpr = out.dtype.element_ty
        result = gl.convert_layout(activated(total, second, 1.0, 0.0, GATED, kind).to(kind), STORED)
        row = first_row + gl.arange(0, NUM_ROWS, layout=gl.SliceLayout(0, STORED))[None, :]
        column = column + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, STORED))[:, None]
        fits = (row < num_rows) & (column < num_columns)
        if JOINED:
            fits = fits & (row // 8 >= begin) & (row // 8 < end)
        if RESIDUAL:
            more = gl.load(residual + row * residual_stride + column, mask=fits, other=0.0)
            result = (result.to(gl.float32) + more.to(gl.float32)).to(kind)
        gl.store(out + row * num_columns + column, result, mask=fits)


@gluon.jit
def _compute(
    WHICH: gl.constexpr, weight_at, row_at, more_at, ready, free, out, residual, sums, counters, num_pieces, num_steps,
    split, num_rows, num_columns, residual_stride, GATED: gl.constexpr, SUMS: gl.constexpr, JOINED: gl.constexpr,
    RESIDUAL: gl.constexpr, ROWS: gl.constexpr, MORE: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """A warpgroup: its half of the outputs of every piece of work, with sums for up to two blocks of them and for one
    or two blocks of rows. What is not there is as small as it can be."""
    SECOND: gl.constexpr = ROWS if BLOCKS == 2 else 8
    OTHER: gl.constexpr = MORE if MORE > 0 else 8
    SECOND_OTHER: gl.constexpr = OTHER if BLOCKS == 2 else 8
    OF_ROWS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    OF_SECOND: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SECOND, 16])
    OF_OTHER: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OTHER, 16])
    OF_SECOND_OTHER: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SECOND_OTHER, 16])
    if EARLY:
        cuda.gdc_wait()
    turn = 0
    for piece in range(gl.program_id(0), num_pieces, gl.num_programs(0)):
        tile, part, begin, end = _piece(piece, num_steps, split)
        total = gl.zeros([BLOCK, ROWS], gl.float32, OF_ROWS)
        second = gl.zeros([BLOCK, SECOND], gl.float32, OF_SECOND)
        other = gl.zeros([BLOCK, OTHER], gl.float32, OF_OTHER)
        second_other = gl.zeros([BLOCK, SECOND_OTHER], gl.float32, OF_SECOND_OTHER)
        for _step in range(begin, end):
            stage = turn % STAGES
            first = (stage * 2 + WHICH) * BLOCKS
            mbarrier.wait(ready.index(stage), turn // STAGES & 1)
            weights, rows = weight_at.index(first), row_at.index(stage).permute((1, 0))
            total = warpgroup_mma(weights, rows, total, is_async=True)
            if BLOCKS == 2:
                second = warpgroup_mma(weight_at.index(first + 1), rows, second, is_async=True)
            if MORE > 0:
                more_rows = more_at.index(stage).permute((1, 0))
                other = warpgroup_mma(weights, more_rows, other, is_async=True)
                if BLOCKS == 2:
                    second_other = warpgroup_mma(weight_at.index(first + 1), more_rows, second_other, is_async=True)
            total, second, other, second_other = warpgroup_mma_wait(0, [total, second, other, second_other])
            mbarrier.arrive(free.index(stage), count=1)
            turn += 1
        own, own_end = part * ((ROWS + MORE) // 8) // split, (part + 1) * ((ROWS + MORE) // 8) // split
        if JOINED:
            total, second, other, second_other = exchange(
                total, second, other, second_other, sums, counters, tile * 2 + WHICH, part, split, own, own_end,
                ROWS, MORE, BLOCKS,
            )  # fmt: skip
        column = (tile * 2 + WHICH) * BLOCK
        if GATED == 0:
            column = column * BLOCKS
        _leave(
            total, second, out, residual, column, 0, part, num_rows, num_columns, residual_stride, own, own_end, GATED,
            SUMS, JOINED, RESIDUAL,
        )  # fmt: skip
        if MORE > 0:
            _leave(
                other, second_other, out, residual, column, ROWS, part, num_rows, num_columns, residual_stride, own,
                own_end, GATED, SUMS, JOINED, RESIDUAL,
            )  # fmt: skip
        if BLOCKS == 2 and GATED == 0:
            _leave(
                second, second, out, residual, column + BLOCK, 0, part, num_rows, num_columns, residual_stride, own,
                own_end, GATED, SUMS, JOINED, RESIDUAL,
            )  # fmt: skip
            if MORE > 0:
                _leave(
                    second_other, second_other, out, residual, column + BLOCK, ROWS, part, num_rows, num_columns,
                    residual_stride, own, own_end, GATED, SUMS, JOINED, RESIDUAL,
                )  # fmt: skip


@gluon.jit(do_not_specialize=["num_rows", "num_pieces", "num_steps", "split", "counters"])
def _row_products(
    weights, rows, more_rows, out, residual, sums, counters, num_pieces, num_steps, split, num_rows, num_columns,
    residual_stride, GATED: gl.constexpr, SUMS: gl.constexpr, JOINED: gl.constexpr, RESIDUAL: gl.constexpr,
    ROWS: gl.constexpr, MORE: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """out [T, N]; GATED, a gate's number: the weight's rows are gates, then ups; the result is act(gate) * up. Or, with
    SUMS, out [split, N, SUMS] in float32: of every part of the inputs, rows beyond T too. Or parts are JOINED: they
    exchange them, and a residual may be added. The input's rows come as ROWS and MORE, powers of two."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    kind: gl.constexpr = weights.dtype
    weight_at = gl.allocate_shared_memory(kind, [STAGES * 2 * BLOCKS, BLOCK, DEPTH], TILE)
    row_at = gl.allocate_shared_memory(kind, [STAGES, ROWS, DEPTH], TILE)
    more_at = row_at
    if MORE > 0:
        more_at = gl.allocate_shared_memory(kind, [STAGES, MORE, DEPTH], TILE)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(STAGES):
        mbarrier.init(ready.index(number), count=1)
        mbarrier.init(free.index(number), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_compute, (
                0, weight_at, row_at, more_at, ready, free, out, residual, sums, counters, num_pieces, num_steps,
                split, num_rows, num_columns, residual_stride, GATED, SUMS, JOINED, RESIDUAL, ROWS, MORE, BLOCKS,
                STAGES, EARLY,
            )),
            (_compute, (
                1, weight_at, row_at, more_at, ready, free, out, residual, sums, counters, num_pieces, num_steps,
                split, num_rows, num_columns, residual_stride, GATED, SUMS, JOINED, RESIDUAL, ROWS, MORE, BLOCKS,
                STAGES, EARLY,
            )),
            (_bring, (
                weights, rows, more_rows, weight_at, row_at, more_at, ready, free, num_pieces, num_steps, split,
                num_columns, GATED, ROWS, MORE, BLOCKS, STAGES, EARLY,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _add_up(
    sums, bias, residual, out, num_rows, num_columns, residual_stride, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, SPLIT: tl.constexpr, SUMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """What all parts have left, sums [SPLIT, N, SUMS], added in their order; with what follows a product."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    fits = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    first_bias, second_bias, more = beside(
        bias, residual, row[:, None], column[None, :], fits, num_columns, residual_stride, GATED, HAS_BIAS, HAS_RESIDUAL
    )
    height = num_columns * 2 if GATED else num_columns
    at = sums + column.to(tl.int64)[:, None] * SUMS + row[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    second = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for part in tl.static_range(SPLIT):
        shift = tl.cast(height, tl.int64) * (part * SUMS)
        total += tl.load(at + shift, mask=(column < num_columns)[:, None], other=0.0)
        if GATED:
            shift += tl.cast(num_columns, tl.int64) * SUMS
            second += tl.load(at + shift, mask=(column < num_columns)[:, None], other=0.0)
    finish(
        total.T, second.T, first_bias, second_bias, more, out, row[:, None], column[None, :], fits, num_columns,
        GATED, HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    gated: int = gates.NONE,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """x [T, in], weight [out, in] -> [T, out], plus residual [T, out]; `gated`, a gate's number:
    [T, out / 2], act(gate) * up. `out`: where to put the result, dense. A row's bits may depend on how many there
    are. The weight must not be what the launch before makes: reading it begins before that has ended."""
    x = x if _can_be_copied(x) else x.clone(memory_format=torch.contiguous_format)
    residual = residual if residual is None or residual.stride(-1) == 1 else residual.contiguous()
    (num_rows, inner), height = x.shape, len(weight)
    num_columns = height // 2 if gated else height
    out = x.new_empty(num_rows, num_columns) if out is None else out
    tile = tile or tile_for(num_rows, height, inner, gated, num_processors(x.device))
    num_steps, early = triton.cdiv(inner, DEPTH.value), launch.early(x) and num_rows <= RESIDENT_ROWS
    split = min(tile.split, num_steps)
    first, more = blocks_of_rows(num_rows)
    num_tiles = triton.cdiv(height, 2 * BLOCK.value * tile.blocks)
    num_pieces = num_tiles * split
    whole = bias is None and (not gated or tile.blocks == 2)
    counters = counters_for(x.device, 2 * num_tiles) if tile.joined and split > 1 and whole else None
    joined = counters is not None
    at_once = whole and (joined or (split == 1 and residual is None))
    gate = gated if at_once else gates.NONE  # on the way out of the first launch
    sums = out
    if joined or not at_once:
        outputs = num_tiles * 2 * BLOCK.value * tile.blocks if joined else height
        sums = torch.empty(split, outputs, first + more, dtype=torch.float32, device=x.device)
    _row_products[(min(num_pieces, num_processors(x.device)),)](
        _tiles(weight, BLOCK.value), _tiles(x, first), _tiles(x, more or first), out if at_once else sums,
        out if residual is None else residual, sums, sums if counters is None else counters, num_pieces, num_steps,
        split, num_rows, num_columns if gate else height, 0 if residual is None else residual.stride(0),
        GATED=int(gate), SUMS=0 if at_once else first + more, JOINED=joined,
        RESIDUAL=joined and residual is not None, ROWS=first, MORE=more, BLOCKS=tile.blocks, STAGES=tile.stages,
        EARLY=early, num_warps=4, **launch.options(early),
    )  # fmt: skip
    if not at_once:
        _add_up[(triton.cdiv(num_rows, ADDED_ROWS), triton.cdiv(num_columns, ADDED_COLUMNS))](
            sums, out if bias is None else bias, out if residual is None else residual, out, num_rows, num_columns,
            0 if residual is None else residual.stride(0), GATED=int(gated), HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None, SPLIT=split, SUMS=first + more, BLOCK_M=ADDED_ROWS,
            BLOCK_N=ADDED_COLUMNS, EARLY=early, **launch.options(early),
        )  # fmt: skip
    return out


def is_faster(num_rows: int, height: int, inner: int, gated: int) -> bool:
    """Than cuBLAS with what follows: what was measured, and wider ones."""
    shape = (num_rows, height, inner)
    return any(is_gated == bool(gated) and all(map(contains, sizes, shape)) for is_gated, *sizes in FASTER)


def fits(num_rows: int, weight: Tensor) -> bool:
    """Whether a product like this can be computed here: what the copy engine and the registers can be given."""
    is_narrow = weight.dtype in (torch.bfloat16, torch.float16)
    return MIN_ROWS <= num_rows <= MAX_ROWS and is_narrow and _can_be_copied(weight)


def tile_for(num_rows: int, height: int, inner: int, gated: int, processors: int) -> Tile:
    """The fastest where it is used. A gate's outputs have the largest tile that registers hold, whose result goes out
    at once. Others have a program for every multiprocessor, as far as parts are long enough; with twice the outputs in
    a tile there would be twice the parts, and their sums cost more than the rows that are read less often."""
    covered = sum(blocks_of_rows(num_rows))
    blocks = 2 if gated and 2 * covered * BLOCK.value // 128 <= MAX_SUMS else 1
    stages = most_stages(num_rows, blocks)
    if blocks == 2:
        return Tile(2, 3 if covered > 64 else stages)
    most = min(MAX_SPLIT, inner // (DEPTH.value * MIN_STEPS))
    split = min(processors // triton.cdiv(height, 2 * BLOCK.value), most)
    return Tile(1, stages, max(split, 1))


def most_stages(num_rows: int, blocks: int) -> int:
    """Stages of the ring that a program has room for."""
    step = (2 * blocks * BLOCK.value + sum(blocks_of_rows(num_rows))) * DEPTH.value * 2
    return min(MAX_SHARED // step, MAX_STAGES)


def blocks_of_rows(num_rows: int) -> tuple[int, int]:
    """So many rows as one power of two, or two of them, at least 32."""
    first = 64
    while 2 * first <= min(num_rows, 256):
        first *= 2
    rest = max(num_rows - first, 0)
    more = triton.next_power_of_2(max(rest, 32)) if rest else 0
    return (first, more) if more < first else (2 * first, 0)


def _tiles(matrix: Tensor, num_rows: int) -> TensorDescriptor:
    swizzled: Any = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [num_rows, DEPTH.value], swizzled)


def _can_be_copied(x: Tensor) -> bool:
    return x.data_ptr() % 16 == 0 and x.stride(1) == 1 and x.stride(0) % 8 == 0
