"""Attention of drafts that grow from a text like branches from a trunk, with gradients: what a drafter is trained with.
A query sees some of the trunk's keys and those of its own branch, and no other branch's."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

KeysAndValues = tuple[Tensor, Tensor]
UNSEEN = -1e4  # added to a score. Finite: of a query that sees nothing of the trunk nothing becomes of it either
LSE_MULTIPLE = 32  # sums of so many queries at a time, as CUDA's kernel keeps them
aten = torch.ops.aten


def trunk_attention(q: Tensor, trunk: KeysAndValues, seen: Tensor, scale: float) -> Tensor:
    """q [R, S, heads, D] and keys and values [R, S, kv heads, D] of texts, seen [R, S, S] -> [R, S, heads, D]."""
    group = q.shape[2] // trunk[0].shape[2]
    keys, values = (x.repeat_interleave(group, dim=2).transpose(1, 2) for x in trunk)
    found = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, seen[:, None], scale=scale)
    return found.transpose(1, 2)


def branch_attention(q: Tensor, trunk: KeysAndValues, own: KeysAndValues, seen: Tensor, scale: float) -> Tensor:
    """q [R, A, B, heads, D] of A branches, trunk [R, S, kv heads, D], own [R, A, O, kv heads, D], of which a query sees
    those of its branch, seen [R, A, S] -> [R, A, B, heads, D]. One softmax over both; no tensor of [A, S] is kept for
    every head."""
    if q.shape[-1] % 8:  # which CUDA's kernel cannot take
        return branch_attention_reference(q, trunk, own, seen, scale)
    parts = [x.to(trunk[1].dtype) for x in (q, *trunk, *own)]  # norms of heads may have widened some
    return _Branches.apply(*parts, seen, scale)  # type: ignore[no-untyped-call]


def branch_attention_reference(
    q: Tensor, trunk: KeysAndValues, own: KeysAndValues, seen: Tensor, scale: float
) -> Tensor:
    """All scores at once, in float32."""
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


class _Branches(torch.autograd.Function):
    """Torch's attention over the trunk, then the few keys of the branch itself with the same softmax: forwards both
    parts are weighed by their sums; backwards torch's kernel is given the output and the sums of both, so that it finds
    the weights that the trunk's keys really had."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor, seen: Tensor,
        scale: float,
    ) -> Tensor:  # fmt: skip
        num_rows, num_branches, num_queries, num_heads, _ = q.shape
        queries, group = q.flatten(1, 2).transpose(1, 2), num_heads // keys.shape[2]  # [R, heads, A B, D]
        wide_keys, wide_values = (x.repeat_interleave(group, dim=2).transpose(1, 2) for x in (keys, values))
        bias = _bias(seen, q.dtype, num_queries).expand(-1, num_heads, -1, -1)
        past, past_sum, *kept = _attend(queries, wide_keys, wide_values, bias, scale)
        with torch.autocast(q.device.type, enabled=False):
            scores = _of_groups(q, group).float() @ own_keys.permute(0, 1, 3, 4, 2).float() * scale
            split = (num_rows, num_heads, num_branches, num_queries)
            sums = _of_groups(past_sum.unflatten(2, split[2:]).permute(0, 2, 3, 1)[..., None], group)  # [R, A, G, Q, 1]
            total = torch.logaddexp(sums, scores.logsumexp(-1, keepdim=True))
            found = _of_groups(past.transpose(1, 2).unflatten(1, split[2:]), group).float() * torch.exp(sums - total)
            found += torch.exp(scores - total) @ own_values.permute(0, 1, 3, 2, 4).float()
        out = _of_heads(found, group).to(q.dtype)
        whole_sum = _of_heads(total, group)[..., 0].permute(0, 3, 1, 2).flatten(2).contiguous()  # [R, heads, A B]
        ctx.save_for_backward(q, keys, values, own_keys, own_values, bias, scores, total, out, whole_sum, *kept)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        q, keys, values, own_keys, own_values, bias, scores, total, out, whole_sum, *kept = ctx.saved_tensors
        group, size, slope = q.shape[3] // keys.shape[2], q.shape[1:3], slope.contiguous()
        queries, past_out, past_slope = (x.flatten(1, 2).transpose(1, 2) for x in (q, out, slope))
        wide_keys, wide_values = (x.repeat_interleave(group, dim=2).transpose(1, 2) for x in (keys, values))
        by_q, *by_wide = _attend_backward(
            past_slope, queries, wide_keys, wide_values, bias, past_out, whole_sum, kept, ctx.scale
        )
        by_keys, by_values = (x.transpose(1, 2).unflatten(2, (-1, group)).sum(3) for x in by_wide)
        wanted, given = _of_groups(slope, group).float(), _of_groups(q, group).float()  # [R, A, G, Q, D]
        weights = torch.exp(scores - total)  # [R, A, G, Q, O]
        mean = (wanted * _of_groups(out, group).float()).sum(-1, keepdim=True)
        by_scores = weights * (wanted @ own_values.permute(0, 1, 3, 4, 2).float() - mean) * ctx.scale
        by_own_values = (weights.transpose(-1, -2) @ wanted).permute(0, 1, 3, 2, 4).to(q.dtype)
        by_own_keys = (by_scores.transpose(-1, -2) @ given).permute(0, 1, 3, 2, 4).to(q.dtype)
        from_own = _of_heads(by_scores @ own_keys.permute(0, 1, 3, 2, 4).float(), group)
        by_q = (by_q.transpose(1, 2).unflatten(1, size).float() + from_own).to(q.dtype)
        return by_q, by_keys.to(q.dtype), by_values.to(q.dtype), by_own_keys, by_own_values, None, None


def _of_groups(x: Tensor, group: int) -> Tensor:
    """x [R, A, B, heads, D] -> [R, A, G, heads / G B, D]: all that share a key's head together."""
    return x.unflatten(3, (-1, group)).permute(0, 1, 3, 4, 2, 5).flatten(3, 4)


def _of_heads(x: Tensor, group: int) -> Tensor:
    """And back."""
    return x.unflatten(3, (group, -1)).permute(0, 1, 4, 2, 3, 5).flatten(3, 4)


def _bias(seen: Tensor, dtype: torch.dtype, num_queries: int) -> Tensor:
    """seen [R, A, S] -> [R, 1, A B, S], with rows that begin where CUDA's kernel wants them."""
    num_rows, num_branches, length = seen.shape
    bias = torch.full((num_rows, num_branches, -(-length // 16) * 16), UNSEEN, dtype=dtype, device=seen.device)
    bias[..., :length].masked_fill_(seen, 0.0)
    bias = bias.repeat_interleave(num_queries, dim=1) if num_queries > 1 else bias
    return bias[:, None, :, :length]


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, ...]:
    """All [R, heads, rows, D] -> the mean of the values, the scores' log-sum-exp, and what the way back needs."""
    if not q.is_cuda:
        return tuple(aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=bias, scale=scale))
    out, sums, *kept = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, False, scale=scale)
    return out, sums[..., : q.shape[2]], *kept


def _attend_backward(
    slope: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor, sums: Tensor, kept: list[Tensor],
    scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """-> by q, k and v."""
    if not q.is_cuda:
        sums = sums.transpose(1, 2).contiguous().transpose(1, 2)  # as it was given
        return tuple(
            aten._scaled_dot_product_flash_attention_for_cpu_backward(
                slope, q, k, v, out, sums, 0.0, False, attn_mask=bias, scale=scale
            )
        )
    sums = F.pad(sums, (0, -sums.shape[2] % LSE_MULTIPLE), value=torch.inf)
    wanted = [True, True, True, False]
    found = aten._scaled_dot_product_efficient_attention_backward(
        slope, q, k, v, bias, out, sums, *kept, 0.0, wanted, False, scale=scale
    )
    return tuple(found[:3])
