"""Attention of a few rows over pages in fp8. Where rows are few, keys should cost what it takes to read them, and half
the bytes must not take twice the instructions. So two neighbours of a key are read as one word of 16 bits, which goes
through shared memory as any number of 16 bits does, and is then two numbers: a value's even places are multiplied apart
from its odd ones, and a key's every second pair apart from the others. All products are of float16, in which fp8 is
exact, and into which the device widens two numbers with one instruction."""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(65504.0)  # that float16 holds: no query comes close
LIFT = tl.constexpr(12.0)  # shares of up to 2^12: float16 ends at 2^-24, and many small ones count
# two words -> their lower bytes, and their upper ones, as pairs of float16
ASSEMBLY = tl.constexpr(
    "{ .reg .b32 t; .reg .b16 pair, rest;"
    " prmt.b32 t, $2, 0, 0x4420; mov.b32 {pair, rest}, t; cvt.rn.f16x2.e4m3x2 $0, pair;"
    " prmt.b32 t, $2, 0, 0x4431; mov.b32 {pair, rest}, t; cvt.rn.f16x2.e4m3x2 $1, pair; }"
)
# two words -> both numbers of the first, and both of the second: nothing has to be picked
PAIRS = tl.constexpr(
    "{ .reg .b16 first, second; mov.b32 {first, second}, $2;"
    " cvt.rn.f16x2.e4m3x2 $0, first; cvt.rn.f16x2.e4m3x2 $1, second; }"
)


@triton.jit
def in_float16(query):
    """Queries for pages in fp8: bfloat16 would take several instructions for every key's number."""
    return tl.clamp(query.to(tl.float32), -LARGEST, LARGEST).to(tl.float16)


@triton.jit
def halves(words):
    """Words of 16 bits that hold two numbers in fp8 -> those in the lower bytes, and in the upper ones."""
    if COMPILED:
        even, odd = tl.inline_asm_elementwise(ASSEMBLY, "=r,=r,r", [words], (tl.float16, tl.float16), True, 2)
    else:
        even = (words & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        odd = ((words >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return even, odd


@triton.jit
def pairs(words):
    """Words of 16 bits [N, W] that hold two numbers in fp8 each -> both of every word with an even number, and of those
    with an odd one: [N, W] twice, each in its order."""
    if COMPILED:  # neighbours along a row lie in one register
        first, second = tl.inline_asm_elementwise(PAIRS, "=r,=r,r", [words], (tl.float16, tl.float16), True, 2)
    else:
        numbers = tl.join(*halves(words))
        shape: tl.constexpr = (words.shape[0], words.shape[1] // 2, 2, 2)
        first, second = tl.split(tl.permute(tl.reshape(numbers, shape), (0, 1, 3, 2)))
        first, second = tl.reshape(first, words.shape), tl.reshape(second, words.shape)
    return first, second


COMPILED = tl.constexpr(isinstance(halves, triton.JITFunction))  # an interpreter has no assembly


@triton.jit
def softmax_step(
    best, weight, score, key, index, last, first_key, scale, softcap,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, LIFTED: tl.constexpr,
):  # fmt: skip
    """With the scores of a block of keys: what they are compared with from now on, the sum of all shares, what those so
    far shrink to, and this block's shares. LIFTED: of up to 2^LIFT instead of 1."""
    if SOFTCAP:
        score = softcap * (1 - 2 / (1 + tl.exp2(2.8853900817779268 * (score * scale) / softcap)))
    if MASKED:
        seen = (key[None, :] <= last[:, None]) & (key[None, :] >= first_key)
        if WINDOW > 0:
            seen = seen & (key[None, :] > index[:, None] - WINDOW)
        score = tl.where(seen, score, float("-inf"))
    top = tl.max(score, 1)
    if not SOFTCAP:
        top = top * scale  # scores are scaled on the way, as they are compared with the best
    if LIFTED:
        top = top - LIFT
    better = tl.maximum(best, top)
    safe = better
    if MASKED:
        safe = tl.where(better == float("-inf"), 0.0, better)  # a row that has seen nothing yet
    shrink = tl.exp2(best - safe)
    if SOFTCAP:
        share = tl.exp2(score - safe[:, None])
    else:
        share = tl.exp2(score * scale - safe[:, None])
    return better, weight * shrink + tl.sum(share, 1), shrink, share


@triton.jit
def _words_at(at, place, NUMBERS: tl.constexpr, PLACES: tl.constexpr):
    """The first NUMBERS numbers in fp8 at some addresses, two in a word, in room for PLACES."""
    at = at.to(tl.pointer_type(tl.int16), bitcast=True)[:, None] + place[None, :]
    if NUMBERS >= PLACES:
        words = tl.load(at)
    else:
        words = tl.load(at, mask=(place < NUMBERS // 2)[None, :], other=0)
    return words


@triton.jit
def attend_words(
    best, weight, total, query, query_rest, index, last, keys_at, values_at, table, begin, end, low, high, part, parts,
    key_row, value_row, first_key, scale, softcap, PAGE: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    VALUE: tl.constexpr, SAME: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """As attention.attend_blocks. Keys that do not exist are others that do, which nobody sees there: masks would be
    as many instructions as copies are."""
    BLOCK_M: tl.constexpr = query.shape[0]
    place, value_place = tl.arange(0, MAIN // 2), tl.arange(0, BLOCK_VALUE // 2)
    query = in_float16(query)
    if SAME:
        query_first, query_second = tl.split(tl.reshape(query, (BLOCK_M, MAIN // 2, 2)))
    else:
        fours = tl.permute(tl.reshape(query, (BLOCK_M, MAIN // 4, 2, 2)), (0, 1, 3, 2))
        query_first, query_second = tl.split(fours)
        query_first = tl.reshape(query_first, (BLOCK_M, MAIN // 2))
        query_second = tl.reshape(query_second, (BLOCK_M, MAIN // 2))
    query_rest = in_float16(query_rest)
    even, odd = tl.split(tl.reshape(total, (BLOCK_M, BLOCK_VALUE // 2, 2)))
    high = tl.where(begin < end, high, low)
    newest = tl.maximum(end - 1, 0)
    first = low + (part - low % parts + parts) % parts
    key = tl.minimum(tl.maximum(first * BLOCK_N + tl.arange(0, BLOCK_N), begin), newest)
    next_page = tl.load(table + key // PAGE)
    for number in range(first, high, parts):
        key = number * BLOCK_N + tl.arange(0, BLOCK_N)
        location = next_page * PAGE + tl.minimum(tl.maximum(key, begin), newest) % PAGE
        if WIDE:
            location = location.to(tl.int64)
        next_key = tl.minimum(tl.maximum(key + parts * BLOCK_N, begin), newest)
        next_page = tl.load(table + next_key // PAGE)
        key_at = keys_at + location * key_row
        words = _words_at(key_at, place, DIM, MAIN)
        keys_first, keys_second = halves(words) if SAME else pairs(words)
        values_even, values_odd = keys_first, keys_second
        if not SAME:
            values = _words_at(values_at + location * value_row, value_place, VALUE, BLOCK_VALUE)
            values_even, values_odd = halves(values)
        score = tl.dot(query_second, keys_second.T, tl.dot(query_first, keys_first.T))
        if REST > 0:
            more = MAIN + tl.arange(0, REST)
            keys = tl.load(key_at[:, None] + more[None, :], mask=(more < DIM)[None, :], other=0.0)
            score = tl.dot(query_rest, keys.to(tl.float16).T, score)
        best, weight, shrink, share = softmax_step(
            best, weight, score, key, index, last, first_key, scale, softcap, MASKED, WINDOW, SOFTCAP, True
        )
        share = share.to(tl.float16)
        even = tl.dot(share, values_even, even * shrink[:, None])
        odd = tl.dot(share, values_odd, odd * shrink[:, None])
    return best, weight, tl.reshape(tl.join(even, odd), (BLOCK_M, BLOCK_VALUE))
