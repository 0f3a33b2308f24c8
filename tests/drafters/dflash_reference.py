"""The DFlash family as the papers write it: no cache, no batch, dense masks, the whole context anew for every draft."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Drafter:
    """Tensors in canonical names, and the options that change the network."""

    tensors: dict[str, Tensor]
    windows: tuple[int, ...] = (0, 0)  # of every layer, itself included; 0: none
    causal: tuple[bool, ...] = (False, False)  # of every layer, within the block
    anchored: bool = False  # windows hold so many keys of the context, whatever the row, and the whole block
    from_anchor: bool = False
    mask_token: int = 253
    heads: int = 4
    kv_heads: int = 2
    eps: float = 1e-5
    theta: float = 10000.0
    neighbours: bool = False  # rotary pairs (2 j, 2 j + 1)
    multiplier: float = 1.0
    softcap: float = 0.0
    top_k: int = 7


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, positions: Tensor, drafter: Drafter) -> Tensor:
    """x [n, heads, D]"""
    half = x.shape[-1] // 2
    angle = positions[:, None, None].float() * drafter.theta ** (-torch.arange(half).float() / half)
    if not drafter.neighbours:
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)
    a, b = x[..., 0::2], x[..., 1::2]
    pairs = [a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()]
    return torch.stack(pairs, dim=-1).flatten(-2)


def attention(drafter: Drafter, layer: int, context: Tensor, block: Tensor) -> Tensor:
    """Queries of the block over keys and values of the context and the block."""
    t, name = drafter.tensors, f"layers.{layer}.self_attn."
    both, positions = torch.cat([context, block]), torch.arange(len(context) + len(block))

    def project(part: str, x: Tensor, count: int) -> Tensor:
        y = F.linear(x, t[f"{name}{part}_proj.weight"], t.get(f"{name}{part}_proj.bias")).view(len(x), count, -1)
        norm = t.get(f"{name}{part}_norm.weight")
        return y if norm is None else rms(y, norm, drafter.eps)

    q = rotate(project("q", block, drafter.heads), positions[len(context) :], drafter)
    k, v = rotate(project("k", both, drafter.kv_heads), positions, drafter), project("v", both, drafter.kv_heads)
    k, v = (y.repeat_interleave(drafter.heads // drafter.kv_heads, dim=1) for y in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    own, key = positions[len(context) :, None], positions[None]
    hidden = key > own if drafter.causal[layer] else torch.zeros_like(key > own)
    if drafter.windows[layer] and drafter.anchored:
        hidden = hidden | (key < len(context) - drafter.windows[layer])
    elif drafter.windows[layer]:
        hidden = hidden | (key <= own - drafter.windows[layer])
    scores = scores.masked_fill(hidden, -math.inf)
    sinks = t.get(f"{name}sinks")
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(block), 1)], dim=-1)
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(both)], v).reshape(len(block), -1)
    return F.linear(mixed, t[f"{name}o_proj.weight"], t.get(f"{name}o_proj.bias"))


def mlp(drafter: Drafter, layer: int, x: Tensor) -> Tensor:
    gate, up, down = (drafter.tensors[f"layers.{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def convolve(drafter: Drafter, name: str, side: int, x: Tensor, source: Tensor) -> Tensor:
    """The convolution before (side 0) or after (side 1) a sublayer, its dynamic weights from the sublayer's input."""
    base = drafter.tensors.get(f"{name}.base_kernel")
    if base is None:
        return x
    taps, groups = base.shape[1], x.shape[1] // 16
    dynamic = F.linear(source, drafter.tensors[f"{name}.kernel_projection.weight"]).view(len(x), 2, taps, groups)
    out = torch.zeros_like(x)
    for row in range(len(x)):
        for tap in range(min(taps, row + 1)):
            out[row] += (base[side, tap] + dynamic[row, side, tap].repeat_interleave(16)) * x[row - tap]
    return out


def network(drafter: Drafter, taps: Tensor, block: Tensor) -> Tensor:
    """taps [n, k, H_t] of the context, embeddings of the block -> what the head reads."""
    t, eps = drafter.tensors, drafter.eps
    context = rms(F.linear(taps.flatten(1), t["fc.weight"]), t["hidden_norm.weight"], eps)
    x = block
    for layer in range(len(drafter.windows)):
        name = f"layers.{layer}."
        source = rms(x, t[f"{name}input_layernorm.weight"], eps)
        mixed = attention(drafter, layer, context, convolve(drafter, f"{name}attention_conv", 0, source, source))
        x = x + convolve(drafter, f"{name}attention_conv", 1, mixed, source)
        source = rms(x, t[f"{name}post_attention_layernorm.weight"], eps)
        mixed = mlp(drafter, layer, convolve(drafter, f"{name}mlp_conv", 0, source, source))
        x = x + convolve(drafter, f"{name}mlp_conv", 1, mixed, source)
    return rms(x, t["norm.weight"], eps)


def corrected(drafter: Drafter, logits: Tensor, hidden: Tensor, before: int) -> Tensor:
    """DSpark's bias and DFlash2's selection, one place at a time."""
    t = drafter.tensors
    if "markov_head.markov_w1.weight" in t:
        latent = t["markov_head.markov_w1.weight"][before]
        if "markov_head.gate_proj.weight" in t:
            gate = F.linear(
                torch.cat([hidden, latent]), t["markov_head.gate_proj.weight"], t["markov_head.gate_proj.bias"]
            )
            latent = latent * gate.sigmoid()
        logits = logits + t["markov_head.markov_w2.weight"] @ latent
    if "candidate_selector.hidden_projection.weight" in t:
        context = t["candidate_selector.predecessor_codebook"][before]
        context = context * (t["candidate_selector.hidden_projection.weight"] @ hidden)
        best = logits.topk(drafter.top_k).indices
        scores = torch.full_like(logits, -math.inf)
        scores[best] = logits[best] + t["candidate_selector.successor_codebook"][best] @ context
        logits = scores
    return logits


def confidence(drafter: Drafter, hidden: Tensor, before: int) -> float:
    t = drafter.tensors
    inputs = torch.cat([hidden, t["markov_head.markov_w1.weight"][before]])
    return float((t["confidence_head.proj.weight"] @ inputs + t["confidence_head.proj.bias"]).sigmoid())


def draft(
    drafter: Drafter, newest: int, taps: Tensor, embed: Tensor, lm_head: Tensor, count: int
) -> tuple[list[int], list[Tensor], list[float]]:
    """`count` greedy draft tokens after the newest token, their logits and the chances of their acceptance; taps
    [n, k, H] of all tokens before the newest."""
    first = 0 if drafter.from_anchor else 1
    block = embed[torch.tensor([newest] + [drafter.mask_token] * (count + first - 1))]
    if "mask_embedding" in drafter.tensors:
        block[1:] = drafter.tensors["mask_embedding"]
    hidden = network(drafter, taps, block)[first:]
    d2t = drafter.tensors.get("d2t")
    tokens: list[int] = []
    kept: list[Tensor] = []
    chances: list[float] = []
    for place in range(count):
        before = tokens[-1] if tokens else newest
        logits = F.linear(hidden[place], lm_head) * drafter.multiplier
        if drafter.softcap:
            logits = drafter.softcap * torch.tanh(logits / drafter.softcap)
        kept.append(corrected(drafter, logits, hidden[place], before))
        best = int(kept[-1].argmax())
        tokens.append(best if d2t is None else best + int(d2t[best]))
        if "confidence_head.proj.weight" in drafter.tensors:
            chances.append(confidence(drafter, hidden[place], before))
    return tokens, kept, chances
