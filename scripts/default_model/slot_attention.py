"""Attention of one query row per slot over a static cache: the Triton kernel, for decoding thousands of slots at once.

It reads a slot's keys only up to its own position, which `decoding.masked_attention`, the plain version, cannot.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # the least number of query rows a tensor-core product takes; a group of heads fills the first few


@triton.jit
def _kernel(query, key, value, output, position, max_len, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    slot, head = tl.program_id(0), tl.program_id(1)
    row, dim, column = tl.arange(0, 16), tl.arange(0, DIM), tl.arange(0, BLOCK)
    pair = (slot * tl.num_programs(1) + head).to(tl.int64)
    last = tl.load(position + slot)
    in_group = row[:, None] < GROUP
    place = pair * GROUP * DIM + row[:, None] * DIM + dim[None, :]
    rows = tl.load(query + place, mask=in_group, other=0.0)
    highest = tl.full([16], -1e30, tl.float32)
    total = tl.zeros([16], tl.float32)
    mixed = tl.zeros([16, DIM], tl.float32)
    for start in range(0, last + 1, BLOCK):
        seen = start + column <= last
        cell = pair * max_len * DIM + (start + column)[:, None] * DIM + dim[None, :]
        keys = tl.load(key + cell, mask=seen[:, None], other=0.0)
        scores = tl.dot(rows, tl.trans(keys)) * (DIM**-0.5)
        scores = tl.where(seen[None, :], scores, -1e30)
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        fade, weight = tl.exp(highest - new_highest), tl.exp(scores - new_highest[:, None])
        values = tl.load(value + cell, mask=seen[:, None], other=0.0)
        mixed = mixed * fade[:, None] + tl.dot(weight.to(values.dtype), values)
        total = total * fade + tl.sum(weight, 1)
        highest = new_highest
    tl.store(output + place, (mixed / total[:, None]).to(output.dtype.element_ty), mask=in_group)


def slot_attention(query: Tensor, key: Tensor, value: Tensor, position: Tensor) -> Tensor:
    """query [B, kv_heads, group, D] over cache [B, kv_heads, max_len, D], up to and with position [B]."""
    num_slots, num_heads, group, dim = query.shape
    assert group <= ROWS
    assert key.is_contiguous()
    assert value.is_contiguous()
    query, output = query.contiguous(), torch.empty_like(query, memory_format=torch.contiguous_format)
    _kernel[(num_slots, num_heads)](query, key, value, output, position, key.shape[2], group, dim, 64)
    return output
