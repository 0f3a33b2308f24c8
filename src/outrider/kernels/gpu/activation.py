"""Gated activations: silu(gate) * up and gelu(gate) * up of one tensor."""

import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import launch

BLOCK = 1024


@triton.jit
def _gated(gate_up, out, size, row_stride, GELU: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    fits = place < size
    gate = tl.load(gate_up + row * row_stride + place, mask=fits, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + size + place, mask=fits, other=0.0).to(tl.float32)
    if GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = gate / (1 + tl.exp(-2 * inner))  # gate * (1 + tanh(inner)) / 2
    else:
        active = gate / (1 + tl.exp(-gate))
    kind = out.dtype.element_ty
    tl.store(out + row * size + place, (active.to(kind).to(tl.float32) * up).to(kind), mask=fits)


def _run(gate_up: Tensor, *, gelu: bool) -> Tensor:
    gate_up = gate_up if gate_up.stride(-1) == 1 else gate_up.contiguous()
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, size)
    if num_rows:
        early = launch.early(gate_up)
        grid = (triton.cdiv(size, BLOCK), num_rows)
        _gated[grid](
            gate_up, out, size, gate_up.stride(0), GELU=gelu, BLOCK=BLOCK, EARLY=early, **launch.options(early)
        )
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 I] -> [T, I]."""
    return _run(gate_up, gelu=False)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 I] -> [T, I]."""
    return _run(gate_up, gelu=True)
