"""EAGLE-3 as the paper writes it: no cache, no batch, the whole history recomputed for every token. Slow on purpose."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Head:
    """Tensors in canonical names, and the options that change the network."""

    tensors: dict[str, Tensor]
    num_layers: int = 1
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    use_taps: bool = True
    heads: int = 4
    kv_heads: int = 2
    eps: float = 1e-5
    theta: float = 10000.0
    logit_scale: float = 1.0


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x [n, heads, D]"""
    dim = x.shape[-1]
    frequency = theta ** (-torch.arange(0, dim, 2).float() / dim)
    angle = positions[:, None, None].float() * frequency
    a, b = x[..., : dim // 2], x[..., dim // 2 :]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


def attention(head: Head, name: str, x: Tensor, positions: Tensor) -> Tensor:
    t, n = head.tensors, len(x)

    def project(part: str, count: int) -> Tensor:
        y = F.linear(x, t[f"{name}{part}_proj.weight"], t.get(f"{name}{part}_proj.bias")).view(n, count, -1)
        norm = t.get(f"{name}{part}_norm.weight")
        return y if norm is None else rms(y, norm, head.eps)

    q, k, v = project("q", head.heads), project("k", head.kv_heads), project("v", head.kv_heads)
    q, k = rotate(q, positions, head.theta), rotate(k, positions, head.theta)
    k, v = (y.repeat_interleave(head.heads // head.kv_heads, dim=1) for y in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(n, -1)
    return F.linear(mixed, t[f"{name}o_proj.weight"])


def mlp(head: Head, name: str, x: Tensor) -> Tensor:
    t = head.tensors
    gate, up = F.linear(x, t[f"{name}gate_proj.weight"]), F.linear(x, t[f"{name}up_proj.weight"])
    return F.linear(F.silu(gate) * up, t[f"{name}down_proj.weight"])


def network(head: Head, embedding: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Rows 0..n-1 at positions 0..n-1 -> (what the head reads, what is fed back)."""
    t, positions = head.tensors, torch.arange(len(state))
    for layer in range(head.num_layers):
        name = f"layers.{layer}."
        if layer == 0:
            normed = rms(state, t[f"{name}hidden_norm.weight"], head.eps)
            residual = normed if head.norm_before_residual else state
            inputs = torch.cat([rms(embedding, t[f"{name}input_layernorm.weight"], head.eps), normed], dim=-1)
        else:
            residual, inputs = state, rms(state, t[f"{name}input_layernorm.weight"], head.eps)
        state = residual + attention(head, f"{name}self_attn.", inputs, positions)
        state = state + mlp(head, f"{name}mlp.", rms(state, t[f"{name}post_attention_layernorm.weight"], head.eps))
    normed = rms(state, t["norm.weight"], head.eps)
    return normed, normed if head.norm_output else state


def combine(head: Head, taps: Tensor) -> Tensor:
    """taps [n, k, H]"""
    if not head.use_taps:
        return taps[:, 0]
    if head.fc_norm:
        taps = torch.stack(
            [rms(taps[:, i], head.tensors[f"fc_norm.{i}.weight"], head.eps) for i in range(taps.shape[1])], dim=1
        )
    flat = taps.flatten(1)
    if head.norm_before_fc:
        flat = rms(flat, head.tensors["input_norm.weight"], head.eps)
    return F.linear(flat, head.tensors["fc.weight"], head.tensors.get("fc.bias"))


def draft(
    head: Head, tokens: list[int], taps: Tensor, embed: Tensor, lm_head: Tensor, count: int
) -> tuple[list[int], list[Tensor]]:
    """`count` greedy draft tokens after `tokens`, and their logits; taps [len(tokens) - 1, k, H] of the target."""
    d2t = head.tensors.get("d2t")
    states = combine(head, taps)  # row p: state p, token p + 1
    drafted: list[int] = []
    logits: list[Tensor] = []
    for _ in range(count):
        ids = torch.tensor(tokens[1:] + drafted)
        normed, feedback = network(head, F.embedding(ids, embed), states)
        logits.append(F.linear(normed[-1], lm_head) * head.logit_scale)
        best = int(logits[-1].argmax())
        drafted.append(best if d2t is None else best + int(d2t[best]))
        states = torch.cat([states, feedback[-1:]])
    return drafted, logits
