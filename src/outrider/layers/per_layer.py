"""Per-layer inputs: a small embedding of every token for every layer, computed once a pass and let in by each layer."""

import torch
from torch import Tensor, nn

from outrider.kernels.activation import Activation
from outrider.layers.embedding import Embedding
from outrider.layers.linear import Linear
from outrider.layers.norm import RMSNorm
from outrider.types import Batch

PER_LAYER = "per-layer inputs"  # in the memo of a pass: [T, layers, D]


class PerLayerInputs(nn.Module):
    """What every layer is told of every row: the token's own embedding for that layer, and a view of the stream."""

    def __init__(self, vocab_size: int, hidden_size: int, num_layers: int, norm: RMSNorm) -> None:
        super().__init__()
        (size,) = norm.weight.shape
        self.embed = Embedding(vocab_size, num_layers * size, scale=size**0.5)
        self.projection = Linear(hidden_size, num_layers * size)
        self.norm = norm

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        """ids [T] and embeddings [T, H] -> [T, layers, D]."""
        shape = (len(x), -1, self.norm.weight.shape[0])
        seen = self.norm((self.projection(x) * x.shape[-1] ** -0.5).view(shape))
        return (seen + self.embed(ids).view(shape)) * 2**-0.5


class PerLayerGate(nn.Module):
    """Adds what layer `number` is told to the residual stream, as far as the stream lets it."""

    def __init__(self, number: int, size: int, norm: RMSNorm, activation: Activation) -> None:
        super().__init__()
        (hidden_size,) = norm.weight.shape
        self.number = number
        self.gate = Linear(hidden_size, size)
        self.projection = Linear(size, hidden_size)
        self.norm = norm
        self.activation = activation

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        told = batch.memo[PER_LAYER][:, self.number]  # [T, D]
        gated = self.activation(torch.cat([self.gate(x), told], dim=-1))
        return x + self.norm(self.projection(gated))
