"""What DSpark adds to a DFlash block: a bias from the token before (the Markov head), and an estimate of each draft
token's chance (the confidence head)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outrider.drafters.dflash_layers import FamilyReader
from outrider.kernels.activation import sigmoid
from outrider.layers.embedding import Embedding
from outrider.layers.linear import Linear
from outrider.types import Weight


@dataclass(frozen=True)
class CorrectionShape:
    rank: int  # 0: no Markov head
    gated: bool = False  # the hidden state decides how much of the token before is heard
    confidence: bool = False
    confidence_with_markov: bool = False  # it hears the token before too
    confidence_bias: bool = False


def read_correction(reader: FamilyReader) -> CorrectionShape | None:
    rank = reader.get("markov_rank", default=0)
    confident = bool(reader.get("enable_confidence_head", default=False))
    has_confidence = "confidence_head.proj.weight" in reader.tensors
    if confident and not has_confidence:
        raise ValueError("enable_confidence_head is true, but there is no tensor confidence_head.proj.weight")
    if not rank and not has_confidence:
        return None
    kind = reader.get("markov_head_type", default="vanilla")
    if kind not in ("vanilla", "gated"):
        raise ValueError(f"markov_head_type = {kind!r} is not supported (supported: vanilla, gated)")
    return CorrectionShape(
        rank=rank,
        gated=kind == "gated",
        confidence=has_confidence,
        confidence_with_markov=bool(reader.get("confidence_head_with_markov", default=True)) and rank > 0,
        confidence_bias="confidence_head.proj.bias" in reader.tensors,
    )


class MarkovHead(nn.Module):
    """logits + W2 W1[token before]; gated: W2 (sigmoid(G [hidden, W1[token before]]) * W1[token before])."""

    def __init__(self, shape: CorrectionShape, hidden_size: int, vocab_size: int, draft_vocab_size: int) -> None:
        super().__init__()
        self.embed = Embedding(vocab_size, shape.rank)
        self.output = Linear(shape.rank, draft_vocab_size)
        self.gate = Linear(hidden_size + shape.rank, shape.rank, bias=True) if shape.gated else None

    def forward(self, logits: Tensor, hidden: Tensor, before: Tensor) -> Tensor:
        """logits [B, V], hidden [B, H], the token before [B] -> logits [B, V]."""
        return logits + self.output(self.heard(hidden, before))

    def heard(self, hidden: Tensor, before: Tensor) -> Tensor:
        """hidden [..., H], the token before [...] -> what W2 makes a bias of [..., r]."""
        latent = self.embed(before)
        if self.gate is None:
            return latent
        both = torch.cat([hidden, latent.to(hidden.dtype)], dim=-1)
        return latent * sigmoid(self.gate(both.flatten(0, -2))).view_as(latent)

    def weights(self) -> dict[str, Weight]:
        names = {"embed.weight": "markov_w1.weight", "output.weight": "markov_w2.weight"}
        if self.gate is not None:
            names |= {f"gate.{part}": f"gate_proj.{part}" for part in ("weight", "bias")}
        return {name: Weight((f"markov_head.{source}",)) for name, source in names.items()}


class ConfidenceHead(nn.Module):
    """The chance that a draft token is accepted, given that those before it are."""

    def __init__(self, shape: CorrectionShape, hidden_size: int) -> None:
        super().__init__()
        self.with_markov = shape.confidence_with_markov
        width = hidden_size + (shape.rank if self.with_markov else 0)
        self.proj = Linear(width, 1, bias=shape.confidence_bias)

    def forward(self, hidden: Tensor, latent: Tensor | None) -> Tensor:
        """hidden [R, H], the Markov embedding of the tokens before [R, r] -> [R]."""
        return sigmoid(self.logits(hidden, latent))

    def logits(self, hidden: Tensor, latent: Tensor | None) -> Tensor:
        if self.with_markov:
            assert latent is not None
            hidden = torch.cat([hidden, latent.to(hidden.dtype)], dim=-1)
        return self.proj(hidden).float()[:, 0]

    def weights(self) -> dict[str, Weight]:
        return {name: Weight((f"confidence_head.{name}",)) for name, _ in self.named_parameters()}
