"""Numbers of 4 and 8 bits as numbers of 16, in registers, and the product of a run of them with inputs: what every
kernel does that reads a matrix in few bits. Kinds have numbers here; a matrix of 16 bits is one of them."""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.kernels.quantised import Kind

DENSE = 5
DENSE_PART = 128  # numbers of 16 bits in a run
NUMBERS = {Kind.INT4: 0, Kind.UINT4: 1, Kind.FP4: 2, Kind.INT8: 3, Kind.FP8: 4}


@triton.jit
def widened(number, KIND: tl.constexpr, dtype: tl.constexpr):
    """What the bits of a number mean; all of them are exact in 16 bits."""
    if KIND == 4:
        value = number.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(dtype)
    elif KIND == 3:
        value = number.to(tl.uint8).to(tl.int8, bitcast=True).to(tl.float32).to(dtype)
    elif KIND == 2:
        size = number & 7
        value = tl.where(size < 5, size * 0.5, tl.where(size == 5, 3.0, tl.where(size == 6, 4.0, 6.0)))
        value = tl.where(number > 7, -value, value).to(dtype)
    else:
        value = (number.to(tl.float32) - (8.0 if KIND == 0 else 0.0)).to(dtype)
    return value


@triton.jit
def number_of(bits, PART: tl.constexpr, PARTS: tl.constexpr, KIND: tl.constexpr):
    """One of the numbers in words of 16 bits, as it was before it was packed."""
    if KIND == 2 and PART == 3:
        number = ((bits >> 11) & 12) | ((bits >> 10) & 3)
    elif KIND == 2:
        number = ((bits >> (12 - 3 * PART)) & 8) | ((bits >> (6 - 3 * PART)) & 7)
    else:
        number = (bits >> (16 // PARTS * PART)) & (2 ** (16 // PARTS) - 1)
    return number


def _asm(*lines: str) -> tl.constexpr:
    return tl.constexpr("{ .reg .b32 t, u, v, w, z; " + " ".join(lines) + " }")


def _eighths(raised: str, less: str | None) -> tl.constexpr:
    """Two words of 16 bits -> four pairs of bfloat16: (n - zero) / 8, or 16 + n / 8. 0x4180 | n is the latter; and n
    in the next four bits, with nothing beside it, is n * 2^-129: times 2^126, plus anything. Bits are picked half as
    fast as numbers are multiplied, so it is the picking that is saved."""
    lines = [f"mov.b32 t, $4; mov.b32 v, 0x7e807e80; mov.b32 w, {raised};", f"mov.b32 z, {less or 0};"]
    for part in (0, 2):
        lines += ["shr.b32 t, $4, 8;"] if part else []
        lines += [f"lop3.b32 ${part}, t, 0x000f000f, {'0x41804180' if less else 'w'}, 0xea;"]
        lines += [f"add.rn.bf16x2 ${part}, ${part}, z;"] if less else []
        lines += ["and.b32 u, t, 0x00f000f0;", f"fma.rn.bf16x2 ${part + 1}, u, v, w;"]
    return _asm(*lines)


def _shifted(name: str, source: str, by: int) -> str:
    return f"shl.b32 {name}, {source}, {by};" if by >= 0 else f"shr.b32 {name}, {source}, {-by};"


def _fp4(*, small: bool) -> tl.constexpr:
    """Words that were spread(): a sign at the top, exponent and mantissa at the end of the exponent; times 2^126, or
    `small`, as they are then."""
    lines = [] if small else ["mov.b32 v, 0x7e807e80;"]
    for part in range(3):
        lines += [f"shl.b32 t, $4, {3 * part};", f"and.b32 ${part}, t, 0x81c081c0;"]
    lines += ["shl.b32 t, $4, 1;", "and.b32 t, t, 0x80008000;", "shr.b32 u, $4, 5;"]
    lines += ["lop3.b32 t, u, 0x01000100, t, 0xea;", "shr.b32 u, $4, 4;", "lop3.b32 $3, u, 0x00c000c0, t, 0xea;"]
    return _asm(*lines, *([] if small else [f"mul.rn.bf16x2 ${part}, ${part}, v;" for part in range(4)]))


def _fp8() -> tl.constexpr:
    """As of fp4, with four bits of exponent and three of mantissa; times 2^120."""
    lines = ["mov.b32 v, 0x7b807b80;"]
    for part in range(2):
        lines += [_shifted("t", "$2", 8 - 8 * part), "shr.b32 u, t, 4;", "and.b32 u, u, 0x07f007f0;"]
        lines += ["lop3.b32 t, t, 0x80008000, u, 0xea;", f"mul.rn.bf16x2 ${part}, t, v;"]
    return _asm(*lines)


RAISED_ASM = _eighths("0x41804180", None)
INT4_ASM, UINT4_ASM = _eighths("0xbf80bf80", "0xc188c188"), _eighths("0", "0xc180c180")
FP4_ASM, FP8_ASM = _fp4(small=False), _fp8()
# numbers that nobody multiplied by 2^126, for products with inputs that somebody has multiplied by 2^96
FP4_SMALL_ASM, LARGER_ASM = _fp4(small=True), _asm("mov.b32 v, 0x6f806f80;", "mul.rn.bf16x2 $0, $1, v;")


@triton.jit
def quarters(bits, KIND: tl.constexpr, dtype: tl.constexpr, FAST: tl.constexpr):
    """Words of 16 bits -> their four numbers. FAST: in bfloat16, two words at a time, and whole numbers in eighths."""
    if FAST:
        ASM: tl.constexpr = INT4_ASM if KIND == 0 else (UINT4_ASM if KIND == 1 else FP4_ASM)
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            ASM, "=r,=r,=r,=r,r", [bits], (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 2
        )
    else:
        w0 = widened(number_of(bits, 0, 4, KIND), KIND, dtype)
        w1 = widened(number_of(bits, 1, 4, KIND), KIND, dtype)
        w2 = widened(number_of(bits, 2, 4, KIND), KIND, dtype)
        w3 = widened(number_of(bits, 3, 4, KIND), KIND, dtype)
    return w0, w1, w2, w3


@triton.jit
def halves(bits, KIND: tl.constexpr, dtype: tl.constexpr, FAST: tl.constexpr):
    """Words of 16 bits -> their two numbers."""
    if FAST and KIND == 4:
        w0, w1 = tl.inline_asm_elementwise(FP8_ASM, "=r,=r,r", [bits], (tl.bfloat16, tl.bfloat16), True, 2)
    else:
        w0 = widened(number_of(bits, 0, 2, KIND), KIND, dtype)
        w1 = widened(number_of(bits, 1, 2, KIND), KIND, dtype)
    return w0, w1


@triton.jit
def _scaled(
    total, part, mass, scale_at, offset_at, number, inner, stride,
    GROUP: tl.constexpr, EVEN: tl.constexpr, HAS_OFFSET: tl.constexpr, EIGHTHS: tl.constexpr,
):  # fmt: skip
    """Adds the sums of a group [..., N, M] as what they stand for; mass [..., M]: the sum of its inputs.
    number [..., 1]: one of the group. EIGHTHS: of numbers an eighth as large."""
    at = number // GROUP * stride
    fits = EVEN | (number < inner)
    scale = tl.load(scale_at + at, mask=fits, other=0.0).to(tl.float32)
    total += part * tl.expand_dims(scale * 8.0 if EIGHTHS else scale, -1)
    if HAS_OFFSET:
        offset = tl.expand_dims(tl.load(offset_at + at, mask=fits, other=0.0).to(tl.float32), -1)
        total += tl.expand_dims(mass, -2) * offset
    return total


@triton.jit
def _plus_raised(
    total, bits, a0, a1, a2, a3, scale_at, offset_at, number, inner, stride,
    KIND: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, HAS_OFFSET: tl.constexpr,
):  # fmt: skip
    """total + bits . a for whole numbers of 4 bits in bfloat16, where a run has one scale. What numbers are raised by
    is taken off their sum, not off each of them: a few rows that hold nothing else, times the same inputs, are where
    the sum begins."""
    ROWS: tl.constexpr = 16  # the fewest that a product takes
    RAISE: tl.constexpr = 17.0 if KIND == 0 else 16.0  # of numbers in eighths
    SLICES: tl.constexpr = bits.shape[0]
    COLUMNS: tl.constexpr = bits.shape[1]
    BLOCK_M: tl.constexpr = total.shape[2]
    w0, w1, w2, w3 = tl.inline_asm_elementwise(
        RAISED_ASM, "=r,=r,=r,=r,r", [bits], (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 2
    )
    raised = tl.full((SLICES, ROWS, bits.shape[2]), -RAISE, dtype=tl.bfloat16)
    nothing = tl.zeros((SLICES, ROWS, BLOCK_M), dtype=tl.float32)
    first, second = tl.dot(raised, a1, tl.dot(raised, a0, nothing)), tl.dot(raised, a3, tl.dot(raised, a2, nothing))
    if COLUMNS > ROWS:
        shape: tl.constexpr = (SLICES, COLUMNS // ROWS, ROWS, BLOCK_M)
        first = tl.reshape(tl.broadcast_to(first[:, None, :, :], shape), total.shape)
        second = tl.reshape(tl.broadcast_to(second[:, None, :, :], shape), total.shape)
    at = number // GROUP * stride
    fits = EVEN | (number < inner)
    if HAS_OFFSET:
        offset = tl.load(offset_at + at, mask=fits, other=0.0).to(tl.float32)
        total += (first + second) * (offset * (-1.0 / RAISE))[:, :, None]
    part = tl.dot(w1, a1, tl.dot(w0, a0, first)) + tl.dot(w3, a3, tl.dot(w2, a2, second))
    return total + part * (8.0 * tl.load(scale_at + at, mask=fits, other=0.0).to(tl.float32))[:, :, None]


@triton.jit
def plus(
    total, bits, a0, a1, a2, a3, m0, m1, m2, m3, scale_at, offset_at, number, inner, stride,
    KIND: tl.constexpr, PART: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, HAS_OFFSET: tl.constexpr,
    IEEE: tl.constexpr, FAST: tl.constexpr, RAISED: tl.constexpr,
):  # fmt: skip
    """total + bits . a, of a run, or of one in each slice; m: the sums of each a. number [..., 1]: the first of each
    run. GROUP 0: scaled in the end. RAISED: with fewer instructions, each of which waits longer."""
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    PARTS: tl.constexpr = 1 if KIND == 5 else (2 if KIND > 2 else 4)
    PIECES: tl.constexpr = PARTS if GROUP == 0 or GROUP >= PARTS * PART else GROUP // PART  # that share a scale
    EIGHTHS: tl.constexpr = FAST and KIND < 2
    if RAISED and EIGHTHS and GROUP >= PARTS * PART:
        total = _plus_raised(
            total, bits, a0, a1, a2, a3, scale_at, offset_at, number, inner, stride, KIND, GROUP, EVEN, HAS_OFFSET
        )
    else:
        nothing = tl.zeros_like(total)
        part = nothing if GROUP > 0 or EIGHTHS else total
        mass = 0.0
        dtype = a0.dtype
        if PARTS == 1:
            part = tl.dot(bits, a0, part, input_precision=precision)
        elif PARTS == 2:
            w0, w1 = halves(bits, KIND, dtype, FAST)
            part = tl.dot(w0, a0, part, input_precision=precision)
            mass = m0
            if PIECES == 1:
                total = _scaled(
                    total, part, mass, scale_at, offset_at, number, inner, stride,
                    GROUP, EVEN, HAS_OFFSET, EIGHTHS,
                )  # fmt: skip
                part, mass, number = nothing, mass * 0.0, number + PART
            part = tl.dot(w1, a1, part, input_precision=precision)
            mass += m1
        else:
            w0, w1, w2, w3 = quarters(bits, KIND, dtype, FAST)
            part = tl.dot(w0, a0, part, input_precision=precision)
            mass = m0
            if PIECES == 1:
                total = _scaled(
                    total, part, mass, scale_at, offset_at, number, inner, stride,
                    GROUP, EVEN, HAS_OFFSET, EIGHTHS,
                )  # fmt: skip
                part, mass, number = nothing, mass * 0.0, number + PART
            part = tl.dot(w1, a1, part, input_precision=precision)
            mass += m1
            if PIECES <= 2:
                total = _scaled(
                    total, part, mass, scale_at, offset_at, number, inner, stride,
                    GROUP, EVEN, HAS_OFFSET, EIGHTHS,
                )  # fmt: skip
                part, mass, number = nothing, mass * 0.0, number + PART * PIECES
            other = tl.dot(w2, a2, nothing, input_precision=precision)  # does not wait for the first two
            mass += m2
            if PIECES == 1:
                total = _scaled(
                    total, other, mass, scale_at, offset_at, number, inner, stride,
                    GROUP, EVEN, HAS_OFFSET, EIGHTHS,
                )  # fmt: skip
                other, mass, number = nothing, mass * 0.0, number + PART
            part += tl.dot(w3, a3, other, input_precision=precision)
            mass += m3
        if GROUP > 0:
            total = _scaled(
                total, part, mass, scale_at, offset_at, number, inner, stride,
                GROUP, EVEN, HAS_OFFSET, EIGHTHS,
            )  # fmt: skip
        else:
            total = total + part * 8.0 if EIGHTHS else part
    return total


@triton.jit
def plus_whole(
    total, bits, a, scale_at, offset_at, number, inner, stride, KIND: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr, HAS_OFFSET: tl.constexpr, IEEE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """total [N, M] + bits [N, PART] . a [K, M] of a run of numbers of 4 bits that has one scale, as one product: each
    of several would be waited for. With two numbers in a word Triton makes several of it, and waits."""
    EIGHTHS: tl.constexpr = FAST and KIND < 2
    w0, w1, w2, w3 = quarters(bits, KIND, a.dtype, FAST)
    weight = tl.permute(tl.join(tl.join(w0, w1), tl.join(w2, w3)), (0, 3, 2, 1))
    weight = tl.reshape(weight, (total.shape[0], a.shape[0]))
    part = tl.zeros_like(total) if GROUP > 0 or EIGHTHS else total
    part = tl.dot(weight, a, part, input_precision="ieee" if IEEE else "tf32")
    if GROUP > 0:
        mass = tl.sum(a.to(tl.float32), 0) if HAS_OFFSET else 0.0
        total = _scaled(total, part, mass, scale_at, offset_at, number, inner, stride, GROUP, EVEN, HAS_OFFSET, EIGHTHS)
    else:
        total = total + part * 8.0 if EIGHTHS else part
    return total
