"""The choice of a token without a tensor of noise: noise is made where a logit is read, and only the best is kept."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import launch

BLOCK = 4096


@triton.jit
def _mix(x):
    """SplitMix64's finaliser."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _choose_block(
    logits, temperature, seeds, requests, positions, ids, cut, last, best, place, row_stride, width, num_blocks,
    cooling, GREEDY: tl.constexpr, HAS_IDS: tl.constexpr, HAS_CUT: tl.constexpr, LEAST: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The best column of a block of a row's logits, with noise unless the row is greedy."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    fits = column < width
    value = tl.load(logits + row * row_stride + column, mask=fits, other=float("-inf")).to(tl.float32)
    if HAS_CUT:
        edge, end = tl.load(cut + row), tl.load(last + row)
        value = tl.where((value > edge) | ((value == edge) & (column <= end)), value, float("-inf"))
    if not GREEDY:
        request = tl.load(requests + row)
        heat = tl.load(temperature + request)
        if heat > LEAST:
            heat *= cooling
            golden = tl.full((1,), 0x9E3779B97F4A7C15, dtype=tl.uint64)
            key = _mix(tl.load(seeds + request).to(tl.uint64, bitcast=True) + golden)
            key = _mix(key + tl.load(positions + row).to(tl.uint64, bitcast=True) * golden)
            id = tl.load(ids + column, mask=fits, other=0) if HAS_IDS else column.to(tl.int64)
            bits = _mix(key + (id + 1).to(tl.uint64, bitcast=True) * golden)
            uniform = ((bits >> 32).to(tl.float32) + 0.5) * 2.3283064365386963e-10
            uniform = tl.minimum(uniform, 1 - 5.9604644775390625e-08)
            # -log(1 - u), exact to the last bits where u is small: those are the ones that win the race
            s = uniform / (2 - uniform)
            z = s * s
            series = 2 * s * (1 + z * (1.0 / 3 + z * (1.0 / 5 + z * (1.0 / 7 + z * (1.0 / 9)))))
            exponential = tl.where(uniform < 0.25, series, -tl.log(1 - uniform))
            value = value / heat - tl.log(exponential)
    top = tl.max(value)
    first = tl.min(tl.where((value == top) & fits, column, 2147483647))
    tl.store(best + row * num_blocks + block, top)
    tl.store(place + row * num_blocks + block, tl.minimum(first, width - 1))


@triton.jit
def _choose_row(best, place, ids, out, num_blocks, HAS_IDS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    value = tl.load(best + row * num_blocks + block, mask=block < num_blocks, other=float("-inf"))
    column = tl.load(place + row * num_blocks + block, mask=block < num_blocks, other=2147483647)
    found = tl.min(tl.where(value == tl.max(value), column, 2147483647))
    token = tl.load(ids + found) if HAS_IDS else found.to(tl.int64)
    tl.store(out + row, token)


def choose(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    requests: Tensor,
    positions: Tensor,
    ids: Tensor | None,
    *,
    greedy: bool,
    least: float,
    cut: tuple[Tensor, Tensor] | None = None,
    out: Tensor | None = None,
    sharpness: float = 1.0,
) -> Tensor:
    """The token of each row [R] of logits [R, V]; options by request [B]. At or under the temperature `least` a row is
    greedy. `cut`: where filters cut the rows off (filter.py). `out`: where to put the tokens. `sharpness`: what logits
    are multiplied by, besides."""
    num_rows, width = logits.shape
    if out is None:
        out = torch.empty(num_rows, dtype=torch.long, device=logits.device)
    if not num_rows:
        return out
    num_blocks = triton.cdiv(width, BLOCK)
    best = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=logits.device)
    place = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=logits.device)
    table, early = out if ids is None else ids, launch.early(logits)
    edge, end = (best, place) if cut is None else cut
    _choose_block[(num_rows, num_blocks)](
        logits, temperature, seeds, requests, positions, table, edge, end, best, place, logits.stride(0), width,
        num_blocks, 1 / sharpness, GREEDY=greedy, HAS_IDS=ids is not None, HAS_CUT=cut is not None, LEAST=least,
        BLOCK=BLOCK, EARLY=early, num_warps=8, **launch.options(early),
    )  # fmt: skip
    _choose_row[(num_rows,)](
        best, place, table, out, num_blocks,
        HAS_IDS=ids is not None, BLOCK=triton.next_power_of_2(num_blocks), EARLY=early, num_warps=1,
        **launch.options(early),
    )  # fmt: skip
    return out
