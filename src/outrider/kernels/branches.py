"""Attention of drafts that grow from a text like branches from a trunk, with gradients: what a drafter is trained with.
A query sees some of the trunk's keys and those of its own branch, and no other branch's."""

import torch
import torch.nn.functional as F
from torch import Tensor

KeysAndValues = tuple[Tensor, Tensor]


def trunk_attention(q: Tensor, trunk: KeysAndValues, seen: Tensor, scale: float) -> Tensor:
    """q [R, S, heads, D] and keys and values [R, S, kv heads, D] of texts, seen [R, S, S] -> [R, S, heads, D]."""
    group = q.shape[2] // trunk[0].shape[2]
    keys, values = (x.repeat_interleave(group, dim=2).transpose(1, 2) for x in trunk)
    found = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, seen[:, None], scale=scale)
    return found.transpose(1, 2)


def branch_attention(q: Tensor, trunk: KeysAndValues, own: KeysAndValues, seen: Tensor, scale: float) -> Tensor:
    """q [R, A, B, heads, D] of A branches, trunk [R, S, kv heads, D], own [R, A, O, kv heads, D], of which a query sees
    those of its branch, seen [R, A, S] -> [R, A, B, heads, D]. One softmax over both, in float32."""
    num_rows, num_branches, num_queries, num_heads, size = q.shape
    keys, values = (x.transpose(1, 2) for x in trunk)  # [R, G, S, D]
    own_keys, own_values = (x.permute(0, 3, 1, 2, 4) for x in own)  # [R, G, A, O, D]
    num_kv, length = keys.shape[1:3]
    grouped = q.unflatten(3, (num_kv, -1)).permute(0, 3, 1, 4, 2, 5) * scale  # [R, G, A, heads / G, B, D]
    flat = grouped.flatten(3, 4)  # [R, G, A, Q, D]
    past = flat.flatten(2, 3) @ keys.transpose(-1, -2)  # [R, G, A Q, S]
    past = past.view(*flat.shape[:4], length).masked_fill(~seen[:, None, :, None], -torch.inf)
    scores = torch.cat([past, flat @ own_keys.transpose(-1, -2)], dim=-1).float()
    weights = scores.softmax(-1).to(q.dtype)  # [R, G, A, Q, S + O]
    from_past = weights[..., :length].flatten(2, 3) @ values
    found = from_past.view(flat.shape) + weights[..., length:] @ own_values
    found = found.unflatten(3, (num_heads // num_kv, num_queries))  # [R, G, A, heads / G, B, D]
    return found.permute(0, 2, 4, 1, 3, 5).reshape(num_rows, num_branches, num_queries, num_heads, size)
