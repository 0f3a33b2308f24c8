"""EAGLE-3 as the paper writes it: no cache, no batch, the whole history recomputed for every token. Slow on purpose."""

import functools
import math
from dataclasses import dataclass

import tiny
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
    norm_before_head: bool = True
    norm_before_residual: bool = False
    use_taps: bool = True
    heads: int = 4
    kv_heads: int = 2
    eps: float = 1e-5
    theta: float = 10000.0
    windows: tuple[int, ...] = ()  # of the layers; 0: none
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


def attend(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """q, k [n, heads, D], v [n, heads, D_v] -> [n, heads * D_v]"""
    n = len(q)
    hidden = torch.ones(n, n).triu(1).bool()
    if window:
        hidden = hidden | torch.ones(n, n).tril(-window).bool()
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v).reshape(n, -1)


def latent_attention(head: Head, name: str, x: Tensor, positions: Tensor) -> Tensor:
    """DeepSeek's, with every head's keys and values written out. What turns comes in pairs (2 j, 2 j + 1)."""
    t, n = head.tensors, len(x)

    def turned(y: Tensor) -> Tensor:
        return rotate(torch.cat([y[..., ::2], y[..., 1::2]], dim=-1), positions, head.theta)

    def up(y: Tensor, part: str) -> Tensor:
        normed = rms(y, t[f"{name}{part}_a_layernorm.weight"], 1e-6)
        return F.linear(normed, t[f"{name}{part}_b_proj.weight"]).view(n, head.heads, -1)

    q = up(F.linear(x, t[f"{name}q_a_proj.weight"]), "q")
    down = F.linear(x, t[f"{name}kv_a_proj_with_mqa.weight"])
    rank = len(t[f"{name}kv_a_layernorm.weight"])
    both, key = up(down[:, :rank], "kv"), turned(down[:, None, rank:])
    turning = key.shape[-1]
    plain = q.shape[-1] - turning
    q = torch.cat([q[..., :plain], turned(q[..., plain:])], dim=-1)
    k = torch.cat([both[..., :plain], key.expand(n, head.heads, turning)], dim=-1)
    return F.linear(attend(q, k, both[..., plain:], 0), t[f"{name}o_proj.weight"])


def attention(head: Head, name: str, x: Tensor, positions: Tensor, window: int = 0) -> Tensor:
    t, n = head.tensors, len(x)
    if f"{name}kv_b_proj.weight" in t:
        return latent_attention(head, name, x, positions)

    def project(part: str, count: int) -> Tensor:
        y = F.linear(x, t[f"{name}{part}_proj.weight"], t.get(f"{name}{part}_proj.bias")).view(n, count, -1)
        norm = t.get(f"{name}{part}_norm.weight")
        return y if norm is None else rms(y, norm, head.eps)

    q, k, v = project("q", head.heads), project("k", head.kv_heads), project("v", head.kv_heads)
    q, k = rotate(q, positions, head.theta), rotate(k, positions, head.theta)
    k, v = (y.repeat_interleave(head.heads // head.kv_heads, dim=1) for y in (k, v))
    return F.linear(attend(q, k, v, window), t[f"{name}o_proj.weight"])


def mlp(head: Head, name: str, x: Tensor) -> Tensor:
    def project(part: str, y: Tensor) -> Tensor:
        return F.linear(y, head.tensors[f"{name}{part}_proj.weight"], head.tensors.get(f"{name}{part}_proj.bias"))

    return project("down", F.silu(project("gate", x)) * project("up", x))


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
        window = head.windows[layer] if head.windows else 0
        state = residual + attention(head, f"{name}self_attn.", inputs, positions, window)
        state = state + mlp(head, f"{name}mlp.", rms(state, t[f"{name}post_attention_layernorm.weight"], head.eps))
    normed = rms(state, t["norm.weight"], head.eps)
    return normed if head.norm_before_head else state, normed if head.norm_output else state


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


_model = functools.cache(tiny.reference)


def target_streams(family: str, tokens: list[int], taps: list[int], *, post_norm: bool = False) -> Tensor:
    """[n, k, H] from transformers."""
    model = _model(family)
    with torch.no_grad():
        states = model(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states
    streams = [*states[:-1], None]  # the last one of transformers comes after the final norm
    kept: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens]))
    hook.remove()
    streams[-1] = states[-1] if post_norm else kept[0]
    return torch.stack([streams[tap][0] for tap in taps], dim=1)
