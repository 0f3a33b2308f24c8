"""EAGLE-1 as the paper writes it: no cache, no batch, the whole history recomputed for every token. Slow on purpose."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from eagle3_reference import Head, attention, mlp, rms
from torch import Tensor


@dataclass
class EagleHead(Head):
    feeds_normed: bool = True


def network(head: EagleHead, embedding: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Rows 0..n-1 at positions 0..n-1 -> (what the head reads, what is fed back)."""
    t, positions = head.tensors, torch.arange(len(state))
    if "embedding_norm.weight" in t:
        embedding = rms(embedding, t["embedding_norm.weight"], head.eps)
    x = F.linear(torch.cat([embedding, state], dim=-1), t["fc.weight"], t.get("fc.bias"))
    for layer in range(head.num_layers):
        name = f"layers.{layer}."
        norm = t.get(f"{name}input_layernorm.weight")
        x = x + attention(head, f"{name}self_attn.", x if norm is None else rms(x, norm, head.eps), positions)
        x = x + mlp(head, f"{name}mlp.", rms(x, t[f"{name}post_attention_layernorm.weight"], head.eps))
    if "norm.weight" not in t:
        return x, x
    normed = rms(x, t["norm.weight"], head.eps)
    return normed, normed if head.feeds_normed else x


def draft(
    head: EagleHead, tokens: list[int], states: Tensor, embed: Tensor, lm_head: Tensor, count: int
) -> tuple[list[int], list[Tensor]]:
    """`count` greedy draft tokens after `tokens`, and their logits; states [len(tokens) - 1, H]: the target's last,
    after its final norm."""
    drafted: list[int] = []
    logits: list[Tensor] = []
    for _ in range(count):
        ids = torch.tensor(tokens[1:] + drafted)  # row p: state p, token p + 1
        normed, feedback = network(head, F.embedding(ids, embed), states)
        logits.append(F.linear(normed[-1], lm_head) * head.logit_scale)
        drafted.append(int(logits[-1].argmax()))
        states = torch.cat([states, feedback[-1:]])
    return drafted, logits
