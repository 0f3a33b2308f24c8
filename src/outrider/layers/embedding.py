"""Token embedding and language-model head: modules that a drafter may share whole."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.kernels.linear import linear
from outrider.kernels.native import unpack_rows
from outrider.kernels.native_tiles import untile_rows
from outrider.kernels.packed import TILES, Packed
from outrider.kernels.quantised import Quantised
from outrider.layers.linear import empty_matrix
from outrider.types import Batch


class Embedding(nn.Module):
    def __init__(self, vocab_size: int, hidden_size: int, *, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.packed: Packed | None = None  # where the weight stays in blocks, and has no floats
        self.scale = scale

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.weight.shape[1]

    def forward(self, ids: Tensor) -> Tensor:
        if self.packed is None:
            rows = F.embedding(ids, self.weight)
        else:
            rows = untile_rows(self.packed, ids) if self.packed.kind == TILES else unpack_rows(self.packed, ids)
        # The scale is rounded to the weights' own precision first, as the models that have one were trained.
        return rows if self.scale == 1.0 else rows * torch.tensor(self.scale, dtype=rows.dtype)


def embed_rows(embed: Embedding, batch: Batch) -> Tensor:
    """The embeddings of a batch's rows [T, H]; those of images come from the vision tower, at no scale."""
    x = embed(batch.input_ids)
    if batch.features is None or batch.features.values.shape[-1] != embed.hidden_size:
        return x
    is_image, values = batch.features.at(0)
    return torch.where(is_image, values.to(x.dtype), x)


class Head(nn.Module):
    """hidden [R, H] -> logits [R, V]; a tied head takes the embedding's own parameter."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, tied: Embedding | None = None, softcap: float = 0.0
    ) -> None:
        super().__init__()
        self.weight = tied.weight if tied is not None else empty_matrix(vocab_size, hidden_size)
        self.packed: Packed | Quantised | None = None
        self.exact = False
        self.softcap = softcap

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.weight.shape[1]

    def forward(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """`out`: where to put the logits."""
        if not self.softcap:
            return linear(hidden, self.weight, None, self.packed, exact=self.exact, out=out)
        logits = linear(hidden, self.weight, None, self.packed, exact=self.exact)
        return torch.mul(torch.tanh(logits / self.softcap), self.softcap, out=out)
