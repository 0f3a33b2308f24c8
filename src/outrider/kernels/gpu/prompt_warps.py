"""What the warps of a program do in attention of prompts (prompt_attention.py), in Gluon: a warp brings keys and values
from the pages with the copy engine (TMA), a block ahead and into the next piece of work too; two warpgroups compute.
While one block's scores become weights (softmax), the product of the weights before with their values runs (wgmma)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

LANES = gl.constexpr(64)  # of a warpgroup: rows times heads
HALF = gl.constexpr(64)  # numbers of a head that are copied at a time: 128 bytes, as far as the swizzle reaches
NOWHERE = gl.constexpr(1 << 30)  # a row that no tensor has: copied as zeros
# what the copying warp tells the others about a piece of work
FIRST_ROW = gl.constexpr(0)  # -1: there is no more
NUM_LANES = gl.constexpr(1)
FIRST_BLOCK = gl.constexpr(2)  # of keys
PARTS = gl.constexpr(3)  # every so manyth block is read
COUNT = gl.constexpr(4)  # of blocks
TAIL = gl.constexpr(5)  # blocks at the end that not all rows see
HEAD = gl.constexpr(6)  # blocks at the beginning that not all rows see
KV_HEAD = gl.constexpr(7)
PLACE = gl.constexpr(8)  # where what is left for this part is kept
FIRST_PLACE = gl.constexpr(9)
COUNTER = gl.constexpr(10)
FACTS = gl.constexpr(11)
copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # Triton 3.6 calls it the latter
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _tell(facts, number: gl.constexpr, value):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    facts.index(number).store(gl.full([1], value, gl.int32, layout))


@gluon.jit
def _told(facts, number: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(facts.index(number).load(layout), 0)


@gluon.jit
def _blocks_below(limit, first, parts):
    """How many of the blocks first, first + parts, ... are below the limit."""
    return gl.maximum(limit - first + parts - 1, 0) // parts


@gluon.jit
def _rows_of(table, key, end, PAGE: gl.constexpr, PAGES: gl.constexpr):
    """Where the pages of the keys from `key` on begin, of a tensor of all rows of all pages."""
    rows = ()
    for number in gl.static_range(PAGES):
        at = key + number * PAGE
        page = gl.load(table + at // PAGE, mask=at < end, other=0)
        rows = rows + (gl.where(at < end, page * PAGE, NOWHERE),)  # type: ignore[assignment]  # noqa: RUF005
    return rows


@gluon.jit
def _take(items, tickets, programs, num_items, num_kv_heads, ITEM: gl.constexpr):
    """The next piece of work that nobody has taken, and whose it is. Every program has had one, its own number's."""
    tile = programs + gl.atomic_add(tickets, 1)
    item = tile // num_kv_heads
    return tile, gl.load(items + item * ITEM, mask=item < num_items, other=-1)


@gluon.jit
def _copy_block(pages, rows, column, bar, to, stage, PAGES: gl.constexpr, HALVES: gl.constexpr):
    for number in gl.static_range(PAGES):
        for half in gl.static_range(HALVES):
            copy(pages, [rows[number], column + half * HALF], bar, to.index((stage * HALVES + half) * PAGES + number))


@gluon.jit
def bring(
    q_rows, k_rows, v_rows, q_at, k_at, v_at, facts, lane_index, ready, free, items, others, tickets, page_table,
    indices, num_items, num_kv_heads, key_head, value_head, table_row, first_key, PAGE: gl.constexpr,
    ITEM: gl.constexpr, GROUP: gl.constexpr, WINDOW: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, SPARED: gl.constexpr,
):  # fmt: skip
    """The copying warp: takes pieces of work one after the other, says what they are and brings what they need. Of the
    barriers `ready` and `free` the first is that of the queries, then come those of the keys, then of the values."""
    HALVES: gl.constexpr = DIM // HALF
    PAGES: gl.constexpr = BLOCK_N // PAGE
    BLOCK_M: gl.constexpr = 2 * LANES
    layout: gl.constexpr = gl.BlockedLayout([BLOCK_M // 32], [32], [1], [0])
    programs = gl.num_programs(0)
    if gl.load(others) >= 0:
        programs = gl.maximum(programs - SPARED, 1)
    tile = gl.program_id(0)
    request = gl.load(items + tile // num_kv_heads * ITEM, mask=tile < programs, other=-1)
    turn = 0
    step = 0
    while request >= 0:
        item = items + tile // num_kv_heads * ITEM
        kv_head = tile % num_kv_heads
        first_row, num_rows, block = gl.load(item + 1), gl.load(item + 2), gl.load(item + 3)
        part, parts, place, counter = gl.load(item + 4), gl.load(item + 5), gl.load(item + 6), gl.load(item + 7)
        next_tile = tile
        next_request = request
        if parts == 1:  # the next piece is known in good time
            next_tile, next_request = _take(items, tickets, programs, num_items, num_kv_heads, ITEM)
        lane = block * BLOCK_M + gl.arange(0, BLOCK_M, layout=layout)
        inside = lane < num_rows * GROUP
        index = gl.load(indices + first_row + lane // GROUP, mask=inside, other=-1).to(gl.int32)
        lowest, highest = gl.min(gl.where(inside, index, 2147483647), 0), gl.max(index, 0)
        end = highest + 1
        begin = first_key
        first_full = first_key
        if WINDOW > 0:
            begin = gl.maximum(begin, lowest - WINDOW + 1)
            first_full = gl.maximum(begin, highest - WINDOW + 1)
        low, high = begin // BLOCK_N, (end + BLOCK_N - 1) // BLOCK_N
        full = gl.minimum((first_full + BLOCK_N - 1) // BLOCK_N, high)
        full_end = gl.maximum((lowest + 1) // BLOCK_N, full)
        first = low + (part - low % parts + parts) % parts
        first = gl.where(first < high, first, high)  # there is none: one is read that nobody sees
        count = gl.maximum(_blocks_below(high, first, parts), 1)
        mbarrier.wait(free.index(0), (turn & 1) ^ 1)
        row = first_row + block * (BLOCK_M // GROUP)
        _tell(facts, FIRST_ROW, row)
        _tell(facts, NUM_LANES, num_rows * GROUP - block * BLOCK_M)
        _tell(facts, FIRST_BLOCK, first)
        _tell(facts, PARTS, parts)
        _tell(facts, COUNT, count)
        _tell(facts, TAIL, count - _blocks_below(full_end, first, parts))
        _tell(facts, HEAD, _blocks_below(full, first, parts))
        _tell(facts, KV_HEAD, kv_head)
        _tell(facts, PLACE, (place + part) * num_kv_heads + kv_head)
        _tell(facts, FIRST_PLACE, place * num_kv_heads + kv_head)
        _tell(facts, COUNTER, counter * num_kv_heads + kv_head)
        lane_index.store(index)
        barrier()
        mbarrier.expect(ready.index(0), BLOCK_M * DIM * 2)
        for which in gl.static_range(2):
            for half in gl.static_range(HALVES):
                corner = [row + which * (LANES // GROUP), kv_head * GROUP, half * HALF]
                copy(q_rows, corner, ready.index(0), q_at.index(which * HALVES + half))
        table = page_table + request * table_row
        for back in range(count):
            key = (first + (count - 1 - back) * parts) * BLOCK_N
            rows = _rows_of(table, key, end, PAGE, PAGES)
            stage = step % STAGES
            phase = (step // STAGES & 1) ^ 1
            for which in gl.static_range(2):  # keys, values
                number = 1 + which * STAGES + stage
                mbarrier.wait(free.index(number), phase)
                mbarrier.expect(ready.index(number), BLOCK_N * DIM * 2)
                if which == 0:
                    _copy_block(k_rows, rows, kv_head * key_head, ready.index(number), k_at, stage, PAGES, HALVES)
                else:
                    _copy_block(v_rows, rows, kv_head * value_head, ready.index(number), v_at, stage, PAGES, HALVES)
            step += 1
        if parts > 1:  # whoever is still putting parts together leaves the next piece to others
            mbarrier.wait(free.index(0), turn & 1)
            next_tile, next_request = _take(items, tickets, programs, num_items, num_kv_heads, ITEM)
        tile = next_tile
        request = next_request
        turn += 1
    mbarrier.wait(free.index(0), (turn & 1) ^ 1)
    _tell(facts, FIRST_ROW, -1)
    barrier()
    mbarrier.arrive(ready.index(0), count=1)
    if gl.atomic_add(tickets + 1, 1) == gl.num_programs(0) - 1:  # nobody will take a ticket any more
        gl.store(tickets, 0)
        gl.store(tickets + 1, 0)


@gluon.jit
def _weigh(
    score, best, weight, index, number, first_key, scale, softcap, MASKED: gl.constexpr, WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Scores of a block -> shares of its keys, and what was summed before shrinks by."""
    if SOFTCAP:
        score = softcap * (1 - 2 / (1 + gl.exp2(2.8853900817779268 * (score * scale) / softcap)))
    if MASKED:
        key = number * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, score.type.layout))
        seen = (key[None, :] <= index[:, None]) & (key[None, :] >= first_key)
        if WINDOW > 0:
            seen = seen & (key[None, :] > index[:, None] - WINDOW)
        score = gl.where(seen, score, float("-inf"))
    top = gl.max(score, 1)
    if not SOFTCAP:
        top = top * scale
    better = gl.maximum(best, top)
    safe = better
    if MASKED:
        safe = gl.where(better == float("-inf"), 0.0, better)  # a row that has seen nothing yet
    shrink = gl.exp2(best - safe)
    if SOFTCAP:
        share = gl.exp2(score - safe[:, None])
    else:
        share = gl.exp2(score * scale - safe[:, None])
    weight = weight * shrink + gl.sum(share, 1)
    return share, better, weight, shrink


@gluon.jit
def _next_block(
    share, best, weight, total, query, keys, values, ready, free, index, step, number, first_key, scale, softcap,
    MASKED: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Scores of block `step` while the one before is multiplied with its values; its weights while that goes on."""
    stage, before = step % STAGES, (step - 1) % STAGES
    mbarrier.wait(ready.index(1 + stage), step // STAGES & 1)
    nothing = gl.zeros([LANES, BLOCK_N], gl.float32, SCORES)
    score = warpgroup_mma(query, keys.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    total = warpgroup_mma(share, values.index(before), total, is_async=True)
    score = warpgroup_mma_wait(1, [score])
    mbarrier.arrive(free.index(1 + stage), count=1)
    later, best, weight, shrink = _weigh(
        score, best, weight, index, number, first_key, scale, softcap, MASKED, WINDOW, SOFTCAP, BLOCK_N
    )
    # a wait, which code is not moved across: the weights are computed before the product is waited for
    mbarrier.wait(ready.index(1 + STAGES + stage), step // STAGES & 1)
    total, share, later, weight = warpgroup_mma_wait(0, [total, share, later, weight])
    mbarrier.arrive(free.index(1 + STAGES + before), count=1)
    total = total * gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))[:, None]
    share = gl.convert_layout(later.to(share.dtype), share.type.layout)
    return share, best, weight, total


@gluon.jit
def _left(best, weight, total, partial, maxima, sums, place, lane, counter, parts):
    """Leaves what a warpgroup has found for a part; whether all the others have left theirs."""
    dim = gl.arange(0, total.shape[1], layout=gl.SliceLayout(0, total.type.layout))
    at = (place * (2 * LANES) + lane).to(gl.int64)
    gl.store(maxima + at, best)
    gl.store(sums + at, weight)
    gl.store(partial + at[:, None] * total.shape[1] + dim[None, :], total)
    barrier()  # all of this warpgroup's threads have written before it is counted
    is_last = gl.atomic_add(counter, 1, sem="acq_rel") == parts - 1
    if is_last:
        gl.store(counter, 0)
    return is_last


@gluon.jit
def _part(total, partial, maxima, sums, place, lane):
    """What a warpgroup has left there, in the layout of `total`."""
    dim = gl.arange(0, total.shape[1], layout=gl.SliceLayout(0, total.type.layout))
    at = (place * (2 * LANES) + lane).to(gl.int64)
    other = gl.load(partial + at[:, None] * total.shape[1] + dim[None, :], cache_modifier=".cg")
    return gl.load(maxima + at, cache_modifier=".cg"), gl.load(sums + at, cache_modifier=".cg"), other


@gluon.jit
def _put_together(best, weight, total, partial, maxima, sums, place, stride, lane, parts):
    """What all parts have left, as one. The arguments' own numbers are among it."""
    best = gl.full_like(best, float("-inf"))
    weight = gl.zeros_like(weight)
    total = gl.zeros_like(total)
    top, seen, other = _part(total, partial, maxima, sums, place, lane)
    for part in range(1, parts + 1):  # the next one is on its way while one is added
        after = place + gl.minimum(part, parts - 1) * stride
        next_top, next_seen, next_other = _part(total, partial, maxima, sums, after, lane)
        better = gl.maximum(best, top)
        safe = gl.where(better == float("-inf"), 0.0, better)
        shrink, grow = gl.exp2(best - safe), gl.exp2(top - safe)
        weight = weight * shrink + seen * grow
        total = total * shrink[:, None] + other * grow[:, None]
        best, top, seen, other = better, next_top, next_seen, next_other
    return best, weight, total


@gluon.jit
def compute(
    WHICH: gl.constexpr, q_at, keys, values, facts, lane_index, ready, free, counters, sinks, out, partial,
    maxima, sums, num_heads, num_kv_heads, first_key, scale, value_scale, softcap, GROUP: gl.constexpr,
    WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr, SOFTCAP: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup: its half of the lanes of every piece of work. The newest keys come first."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    SHARES: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    OF_SCORES: gl.constexpr = gl.SliceLayout(1, SCORES)
    OF_SUMS: gl.constexpr = gl.SliceLayout(1, SUMS)
    OF_STORED: gl.constexpr = gl.SliceLayout(1, STORED)
    query = q_at.index(WHICH)
    turn = 0
    step = 0
    mbarrier.wait(ready.index(0), 0)
    first_row = _told(facts, FIRST_ROW)
    while first_row >= 0:
        num_lanes, first, parts, count = (
            _told(facts, NUM_LANES), _told(facts, FIRST_BLOCK), _told(facts, PARTS), _told(facts, COUNT)
        )  # fmt: skip
        tail, head, kv_head = _told(facts, TAIL), _told(facts, HEAD), _told(facts, KV_HEAD)
        place, first_place, counter = _told(facts, PLACE), _told(facts, FIRST_PLACE), _told(facts, COUNTER)
        index = lane_index.index(WHICH).load(OF_SCORES)
        best = gl.full([LANES], float("-inf"), gl.float32, OF_SCORES)
        weight = gl.zeros([LANES], gl.float32, OF_SCORES)
        total = gl.zeros([LANES, DIM], gl.float32, SUMS)
        number = first + (count - 1) * parts
        stage = step % STAGES
        mbarrier.wait(ready.index(1 + stage), step // STAGES & 1)
        nothing = gl.zeros([LANES, BLOCK_N], gl.float32, SCORES)
        score = warpgroup_mma(query, keys.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        score = warpgroup_mma_wait(0, [score])
        mbarrier.arrive(free.index(1 + stage), count=1)
        share, best, weight, _ = _weigh(
            score, best, weight, index, number, first_key, scale, softcap, True, WINDOW, SOFTCAP, BLOCK_N
        )
        share = gl.convert_layout(share.to(query.dtype), SHARES)
        mbarrier.wait(ready.index(1 + STAGES + stage), step // STAGES & 1)
        last = step + count
        seen_by_all = last - head
        step += 1
        number -= parts
        for at in range(step, step + tail - 1):
            share, best, weight, total = _next_block(
                share, best, weight, total, query, keys, values, ready, free, index, at, number, first_key,
                scale, softcap, True, WINDOW, SOFTCAP, BLOCK_N, STAGES, SCORES,
            )  # fmt: skip
            number -= parts
        step += gl.maximum(tail - 1, 0)
        for at in range(step, seen_by_all):
            share, best, weight, total = _next_block(
                share, best, weight, total, query, keys, values, ready, free, index, at, number, first_key,
                scale, softcap, False, WINDOW, SOFTCAP, BLOCK_N, STAGES, SCORES,
            )  # fmt: skip
            number -= parts
        for at in range(gl.maximum(step, seen_by_all), last):
            share, best, weight, total = _next_block(
                share, best, weight, total, query, keys, values, ready, free, index, at, number, first_key,
                scale, softcap, True, WINDOW, SOFTCAP, BLOCK_N, STAGES, SCORES,
            )  # fmt: skip
            number -= parts
        step = last
        mbarrier.arrive(free.index(0), count=1, pred=parts == 1)
        stage = (step - 1) % STAGES
        total = warpgroup_mma(share, values.index(stage), total, is_async=True)
        total, share = warpgroup_mma_wait(0, [total, share])
        mbarrier.arrive(free.index(1 + STAGES + stage), count=1)

        lane = gl.arange(0, LANES, layout=OF_SUMS) + WHICH * LANES
        best, weight = gl.convert_layout(best, OF_SUMS), gl.convert_layout(weight, OF_SUMS)
        is_last = parts == 1
        if parts > 1:
            counter_at = counters + counter * 2 + WHICH
            is_last = _left(best, weight, total, partial, maxima, sums, place, lane, counter_at, parts)
            if is_last:
                best, weight, total = _put_together(
                    best, weight, total, partial, maxima, sums, first_place, num_kv_heads, lane, parts
                )
            mbarrier.arrive(free.index(0), count=1)
        if HAS_SINKS:
            of_head = sinks + kv_head * GROUP + lane % GROUP
            sink = gl.load(of_head).to(gl.float32) * 1.4426950408889634
            better = gl.maximum(best, sink)
            less = gl.exp2(best - better)
            weight = weight * less + gl.exp2(sink - better)
            total = total * less[:, None]
        total = total * gl.where(weight > 0, value_scale / weight, 0.0)[:, None]
        result = gl.convert_layout(total.to(out.dtype.element_ty), STORED)
        lane = gl.arange(0, LANES, layout=OF_STORED) + WHICH * LANES
        dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, STORED))
        cell = (first_row + lane // GROUP).to(gl.int64) * num_heads + kv_head * GROUP + lane % GROUP
        fits = (lane < num_lanes) & is_last
        gl.store(out + cell[:, None] * DIM + dim[None, :], result, mask=fits[:, None])
        turn += 1
        mbarrier.wait(ready.index(0), turn & 1)
        first_row = _told(facts, FIRST_ROW)
