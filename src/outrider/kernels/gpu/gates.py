"""What activates a product on its way out: of gate and up, or of up alone."""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.kernels.activation import Activation, ClampedSilu, ClampedSwish, gelu_tanh_mul, relu2, silu_mul

NONE, SILU, GELU, SWISH, CLAMPED_SILU, SQUARE = range(6)


def gate_of(activation: Activation) -> tuple[int, float, float]:
    """Its number here (NONE: it has none, and is computed afterwards), and what clamped ones are clamped with."""
    if isinstance(activation, ClampedSwish):
        return SWISH, activation.alpha, activation.limit
    if isinstance(activation, ClampedSilu):
        return CLAMPED_SILU, 1.0, activation.limit
    if activation is silu_mul:
        return SILU, 1.0, 0.0
    if activation is gelu_tanh_mul:
        return GELU, 1.0, 0.0
    return (SQUARE if activation is relu2 else NONE), 1.0, 0.0


def on_the_way(activation: Activation) -> int:
    """Its number where a linear can do it on its way out, else NONE."""
    number, _, _ = gate_of(activation)
    return number if number in (SILU, GELU) else NONE


def has_two(gate: int) -> bool:
    """Whether it is of gate and up."""
    return gate not in (NONE, SQUARE)


@triton.jit
def activated(total, second, alpha, limit, GATE: tl.constexpr, kind: tl.constexpr):
    """Sums in float32, of gate (or of what has none) and of up -> float32, not rounded yet."""
    value = total
    if GATE > 0:
        gate, up = total.to(kind).to(tl.float32), second.to(kind).to(tl.float32)
        if GATE == 5:
            gate = tl.maximum(gate, 0.0)
            value = gate * gate
        elif GATE == 2:
            inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
            value = (gate / (1 + tl.exp(-2 * inner))).to(kind).to(tl.float32) * up
        elif GATE == 3:
            gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
            value = (gate / (1 + tl.exp(-alpha * gate))).to(kind).to(tl.float32) * (up + 1).to(kind).to(tl.float32)
        else:
            swish = (gate / (1 + tl.exp(-gate))).to(kind).to(tl.float32)
            if GATE == 4:
                swish, up = tl.minimum(swish, limit), tl.minimum(tl.maximum(up, -limit), limit)
            value = swish * up
    return value
