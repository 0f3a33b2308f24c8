"""What DFlash2 adds to a DFlash block: convolutions along the block around attention and MLP, and a selector that
walks through the best candidates of each place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.drafters.dflash_layers import FamilyReader
from outrider.layers.attention import SelfAttention
from outrider.layers.block import DecoderBlock
from outrider.layers.embedding import Embedding
from outrider.layers.linear import Linear
from outrider.layers.mlp import GatedMLP
from outrider.types import Batch, Weight


@dataclass(frozen=True)
class ConvShape:
    hidden_size: int
    kernel_size: int
    group_size: int  # channels that share a dynamic weight

    @property
    def num_groups(self) -> int:
        return self.hidden_size // self.group_size


@dataclass(frozen=True)
class SelectorShape:
    rank: int
    top_k: int


def read_conv(reader: FamilyReader) -> ConvShape | None:
    taps = reader.get("conv_kernel_size", default=2 if reader.kind == "dflash2" else 0)
    if not taps:
        return None
    group = reader.get("conv_group_size", default=16)
    hidden_size = reader.layer["hidden_size"]
    if hidden_size % group:
        raise ValueError(f"conv_group_size {group} must divide hidden_size {hidden_size}")
    return ConvShape(hidden_size, taps, group)


def read_selector(reader: FamilyReader) -> SelectorShape | None:
    rank = reader.get("selector_rank", default=256 if reader.kind == "dflash2" else 0)
    return SelectorShape(rank, reader.get("selector_top_k", default=16)) if rank else None


class GroupedConv(nn.Module):
    """Two causal convolutions along a block, one before a sublayer and one after it:
    out[t] = sum over taps o of (base[o] + dynamic[t, o]) * x[t - o], the dynamic weights from the sublayer's input."""

    def __init__(self, shape: ConvShape) -> None:
        super().__init__()
        self.shape = shape
        self.base = nn.Parameter(torch.empty(2, shape.kernel_size, shape.hidden_size))
        self.dynamic = Linear(shape.hidden_size, 2 * shape.kernel_size * shape.num_groups)

    def prepare(self, x: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """x [B R, H], blocks of R rows -> the first convolution [B R, H], and the weights of the second."""
        before, after = self.dynamic(x).view(len(x), 2, self.shape.kernel_size, -1).unbind(1)
        return self._convolve(x, before, self.base[0], num_rows), after

    def finish(self, x: Tensor, after: Tensor, num_rows: int) -> Tensor:
        return self._convolve(x, after, self.base[1], num_rows)

    def _convolve(self, x: Tensor, dynamic: Tensor, base: Tensor, num_rows: int) -> Tensor:
        """x [B R, H], dynamic [B R, taps, groups], base [taps, H]."""
        groups = (self.shape.num_groups, self.shape.group_size)
        blocks = x.view(-1, num_rows, x.shape[-1])
        out = torch.zeros_like(x)
        for tap in range(min(self.shape.kernel_size, num_rows)):
            earlier = F.pad(blocks[:, : num_rows - tap], (0, 0, tap, 0)).reshape(-1, *groups)
            weight = base[tap].view(groups) + dynamic[:, tap, :, None]
            out += (weight * earlier).flatten(1)
        return out


class ConvBlock(DecoderBlock):
    def __init__(self, attention: SelfAttention, mlp: GatedMLP, eps: float, shape: ConvShape) -> None:
        super().__init__(attention, mlp, eps)
        self.attention_conv = GroupedConv(shape)
        self.mlp_conv = GroupedConv(shape)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        num_rows = batch.max_rows  # every request's block is as long
        inputs, after = self.attention_conv.prepare(self.attention_norm(x), num_rows)
        x = x + self.attention_conv.finish(self.attention(inputs, batch), after, num_rows)
        inputs, after = self.mlp_conv.prepare(self.mlp_norm(x), num_rows)
        return x + self.mlp_conv.finish(self.mlp(inputs), after, num_rows)

    def conv_weights(self, source: str) -> dict[str, Weight]:
        return {
            f"{conv}.{name}": Weight((f"{source}{conv}.{stored}",))
            for conv in ("attention_conv", "mlp_conv")
            for name, stored in (("base", "base_kernel"), ("dynamic.weight", "kernel_projection.weight"))
        }


class Selector(nn.Module):
    """Rescores the best candidates of a place by the token before:
    score = logit + (predecessor[token before] * P hidden) . successor[candidate]."""

    def __init__(self, shape: SelectorShape, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.top_k = min(shape.top_k, vocab_size)
        self.predecessor = Embedding(vocab_size, shape.rank)
        self.successor = Embedding(vocab_size, shape.rank)
        self.projection = Linear(hidden_size, shape.rank)

    def forward(self, logits: Tensor, hidden: Tensor, before: Tensor) -> Tensor:
        """logits [B, V], hidden [B, H], the token before [B] -> logits [B, V], -inf for all but the candidates."""
        unary, candidates = logits.topk(self.top_k, dim=-1)  # [B, k]
        context = self.predecessor(before) * self.projection(hidden)  # [B, r]
        edges = (context[:, None] * self.successor(candidates)).sum(-1)
        return torch.full_like(logits, -torch.inf).scatter(-1, candidates, unary + edges)

    def weights(self) -> dict[str, Weight]:
        names = {
            "predecessor.weight": "predecessor_codebook",
            "successor.weight": "successor_codebook",
            "projection.weight": "hidden_projection.weight",
        }
        return {name: Weight((f"candidate_selector.{source}",)) for name, source in names.items()}
