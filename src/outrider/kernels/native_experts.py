"""A mixture's experts in C: one call instead of a dozen torch operations for each expert."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from outrider.kernels.native import MATRIX, _address, _native, matrix_fields
from outrider.kernels.packed import PackedStack

_EXPERTS = struct.Struct(f"@9q 7q {MATRIX} {MATRIX}")  # experts_work of experts.c


def experts(
    x: Tensor,
    ids: Tensor,
    shares: Tensor,
    matrices: tuple[Tensor | PackedStack, Tensor | PackedStack],
    biases: tuple[Tensor | None, Tensor | None],
    *,
    gelu: bool,
) -> Tensor:
    """x [T, H], ids and shares [T, k]; up [E, 2 I, H] and down [E, H, I], with biases [E, 2 I] and [E, H] -> [T, H]."""
    x, ids, shares = x.contiguous(), ids.contiguous(), shares.float().contiguous()
    up, down = matrices
    (num_rows, hidden), num_chosen = x.shape, ids.shape[1]
    num_experts, width, inner = up.shape[0], up.shape[1], down.shape[2]
    assert up.shape[2] == hidden, (x.shape, up.shape)
    assert width == 2 * inner, (up.shape, down.shape)
    assert tuple(down.shape) == (num_experts, hidden, inner), (up.shape, down.shape)
    out, answers = x.new_empty(num_rows, hidden), x.new_empty(num_rows * num_chosen, hidden)
    scratch = x.new_empty(num_rows * (2 * hidden + 3 * inner))
    order = torch.empty(num_rows * num_chosen + num_experts + 1, dtype=torch.int64, device="cpu")
    work = _EXPERTS.pack(
        _address(x),
        _address(ids, torch.int64),
        _address(shares, size=ids.numel()),
        *(0 if bias is None else _address(bias) for bias in biases),
        *(each.data_ptr() for each in (out, answers, scratch, order)),
        *(num_rows, num_chosen, num_experts, hidden, inner, gelu, torch.get_num_threads()),
        *_fields(up),
        *_fields(down),
    )
    _native().experts(work)
    return out


def _fields(stack: Tensor | PackedStack) -> tuple[int, int, int, int, int]:
    if isinstance(stack, PackedStack):
        return matrix_fields(stack.matrix.data, stack.matrix)
    return matrix_fields(stack, None)
