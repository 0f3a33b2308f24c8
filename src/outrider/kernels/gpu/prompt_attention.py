"""Attention of prompts on Hopper (H100, H200): the kernel's launch, and what can be given to it. Programs stay on their
multiprocessor and take pieces of work, the list that all attention shares (attention_work.py), until there are none;
what their warps do is in prompt_warps.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from outrider.kernels.gpu.attention_work import ITEM, Form, Keys, Span, WorkList
from outrider.kernels.gpu.hopper import num_processors
from outrider.kernels.gpu.prompt_warps import FACTS, HALF, LANES, bring, compute

BLOCK_N = 128  # keys of a step
STAGES = 2
PROGRAMS = 2  # pieces of work that a multiprocessor should have
SPARED = 24  # multiprocessors that are left to a launch beside it
memory = gl.shared_memory_descriptor
reinterpret = getattr(memory, "reinterpret", None) or memory._reinterpret  # Triton 3.6 calls it the latter


# whatever places and numbers these have, it is not compiled again
ANY_VALUE = (
    "items", "others", "counters", "tickets", "page_table", "indices", "sinks", "maxima", "sums", "num_items",
    "num_heads", "num_kv_heads", "key_head", "value_head", "table_row", "first_key",
)  # fmt: skip


@gluon.jit(do_not_specialize=ANY_VALUE)
def _attend_prompts(
    q_rows, k_rows, v_rows, items, others, counters, tickets, page_table, indices, sinks, out, partial, maxima, sums,
    num_items, num_heads, num_kv_heads, key_head, value_head, table_row, first_key, scale, value_scale, softcap,
    PAGE: gl.constexpr, ITEM: gl.constexpr, GROUP: gl.constexpr, WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr,
    SOFTCAP: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    SPARED: gl.constexpr,
):  # fmt: skip
    """Programs take pieces of work (a block of rows and heads, a key head, a part of the keys) until there are none.
    Rows and heads are laid out as row * GROUP + head."""
    HALVES: gl.constexpr = DIM // HALF
    PAGES: gl.constexpr = BLOCK_N // PAGE
    BLOCK_M: gl.constexpr = 2 * LANES
    kind: gl.constexpr = k_rows.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    CUBE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=3)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_at = gl.allocate_shared_memory(kind, [2 * HALVES, LANES // GROUP, GROUP, HALF], CUBE)
    k_at = gl.allocate_shared_memory(kind, [STAGES * HALVES * PAGES, PAGE, HALF], TILE)
    v_at = gl.allocate_shared_memory(kind, [STAGES * HALVES * PAGES, PAGE, HALF], TILE)
    query = reinterpret(q_at, kind, [2, LANES, DIM], TILE)
    keys = reinterpret(k_at, kind, [STAGES, BLOCK_N, DIM], TILE)
    values = reinterpret(v_at, kind, [STAGES, BLOCK_N, DIM], TILE)
    facts = gl.allocate_shared_memory(gl.int32, [FACTS, 1], FLAT)
    lane_index = gl.allocate_shared_memory(gl.int32, [BLOCK_M], FLAT)
    own_index = reinterpret(lane_index, gl.int32, [2, LANES], FLAT)
    ready = gl.allocate_shared_memory(gl.int64, [1 + 2 * STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1 + 2 * STAGES, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(1 + 2 * STAGES):
        mbarrier.init(ready.index(number), count=1)
        mbarrier.init(free.index(number), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (compute, (
                0, query, keys, values, facts, own_index, ready, free, counters, sinks, out, partial, maxima,
                sums, num_heads, num_kv_heads, first_key, scale, value_scale, softcap, GROUP, WINDOW, HAS_SINKS,
                SOFTCAP, DIM, BLOCK_N, STAGES,
            )),
            (compute, (
                1, query, keys, values, facts, own_index, ready, free, counters, sinks, out, partial, maxima,
                sums, num_heads, num_kv_heads, first_key, scale, value_scale, softcap, GROUP, WINDOW, HAS_SINKS,
                SOFTCAP, DIM, BLOCK_N, STAGES,
            )),
            (bring, (
                q_rows, k_rows, v_rows, q_at, k_at, v_at, facts, lane_index, ready, free, items, others, tickets,
                page_table, indices, num_items, num_kv_heads, key_head, value_head, table_row, first_key, PAGE, ITEM,
                GROUP, WINDOW, DIM, BLOCK_N, STAGES, SPARED,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def fits(q: Tensor, pages: tuple[Tensor, Tensor], keys: Keys) -> bool:
    """Whether attention like this can be computed here: what the copy engine and the products can be given."""
    group = q.shape[1] // pages[0].shape[2]
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[2] in (64, 128)
        and keys.last_key is None
        and 8 <= keys.page_size <= BLOCK_N
        and _is_power(keys.page_size)
        and group <= LANES.value
        and _is_power(group)
        and all(each.dtype == q.dtype and each.shape[3] == q.shape[2] for each in pages)
        and all(each.stride(0) == keys.page_size * each.stride(1) for each in pages)
        and all(_can_be_copied(each) for each in (q, *pages))
    )


def form(rows: Span, device: torch.device) -> Form:
    """The launch as work is shared out for it."""
    return Form(rows, 2 * LANES.value, BLOCK_N, num_programs=PROGRAMS * num_processors(device))


def attend(
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    keys: Keys,
    work: WorkList,
    beside: WorkList,
    out: Tensor,
    scale: float,
    *,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    value_scale: float,
) -> None:
    """The rows that are listed: q [T, heads, D] -> out [T, heads, D]. Scale and softcap are in units of log 2.
    `beside`: what another launch does at the same time; if that is anything, it is left some multiprocessors."""
    k_pages, v_pages = pages
    num_heads, dim = q.shape[1:]
    num_kv_heads = k_pages.shape[2]
    group = num_heads // num_kv_heads
    name = ("prompt attention", num_kv_heads, id(work))
    counters = keys.memo.get(name)
    if counters is None:  # parts that are finished, for both warpgroups; tickets taken, programs that have ended
        counters = torch.zeros(2 * len(work.counters) + 2, dtype=torch.int32, device=q.device)
        keys.memo[name] = counters
    places = len(work.items) * num_kv_heads * 2 * LANES.value
    partial = torch.empty(places, dim, dtype=torch.float32, device=q.device)
    maxima, sums = torch.empty(2, places, dtype=torch.float32, device=q.device).unbind()
    _attend_prompts[(min(num_processors(q.device), len(work.items) * num_kv_heads),)](
        TensorDescriptor(q, list(q.shape), list(q.stride()), [LANES.value // group, group, HALF.value], _swizzled(3)),
        _rows(k_pages, keys.page_size), _rows(v_pages, keys.page_size), work.items, beside.items, counters,
        counters[-2:], keys.page_table, keys.indices, out if sinks is None else sinks, out, partial, maxima, sums,
        len(work.items), num_heads, num_kv_heads, k_pages.stride(2), v_pages.stride(2), keys.page_table.stride(0),
        keys.first_key, scale, value_scale, softcap, PAGE=keys.page_size, ITEM=ITEM, GROUP=group, WINDOW=window,
        HAS_SINKS=sinks is not None, SOFTCAP=softcap != 0.0, DIM=dim, BLOCK_N=BLOCK_N, STAGES=STAGES,
        SPARED=SPARED, num_warps=4,
    )  # fmt: skip


def _rows(pages: Tensor, page_size: int) -> TensorDescriptor:
    """All rows of all pages, with all heads beside each other."""
    width = (pages.shape[2] - 1) * pages.stride(2) + pages.shape[3]
    shape, strides = [len(pages) * page_size, width], [pages.stride(1), 1]
    return TensorDescriptor(pages, shape, strides, [page_size, HALF.value], _swizzled(2))


def _swizzled(rank: int) -> Any:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


def _is_power(number: int) -> bool:
    return number & (number - 1) == 0


def _can_be_copied(x: Tensor) -> bool:
    return x.data_ptr() % 16 == 0 and x.stride(-1) == 1 and all(stride % 8 == 0 for stride in x.stride()[:-1])
