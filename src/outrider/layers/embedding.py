"""Token embedding and language-model head: modules that a drafter may share whole."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.kernels.linear import linear
from outrider.kernels.packed import Packed


class Embedding(nn.Module):
    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.weight.shape[1]

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class Head(nn.Module):
    """hidden [R, H] -> logits [R, V]; a tied head takes the embedding's own parameter."""

    def __init__(self, vocab_size: int, hidden_size: int, *, tied: Embedding | None = None) -> None:
        super().__init__()
        self.weight = tied.weight if tied is not None else nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.packed: Packed | None = None

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.weight.shape[1]

    def forward(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.weight, None, self.packed)
