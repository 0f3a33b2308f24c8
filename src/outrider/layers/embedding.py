"""Token embedding and language-model head: modules that a drafter may share whole."""

import torch
from torch import Tensor, nn

from outrider.kernels.linear import linear
from outrider.kernels.native import look_up
from outrider.kernels.packed import CHUNK_ROWS, Packed
from outrider.kernels.quantised import Quantised
from outrider.kernels.sampling import Columns
from outrider.kernels.take import take_rows
from outrider.layers.linear import empty_matrix
from outrider.layers.split import current_ranks, cut, vocabulary_share, whole
from outrider.types import Batch


class Embedding(nn.Module):
    """Split over ranks by ids: a rank looks up its own, and all are summed, of which one is not nought."""

    def __init__(self, vocab_size: int, hidden_size: int, *, scale: float = 1.0) -> None:
        super().__init__()
        self.share, num_rows = vocabulary_share(vocab_size)
        self.ranks = current_ranks()
        self.weight = nn.Parameter(torch.empty(num_rows, hidden_size))
        cut(self.weight, 0, self.share)
        self.packed: Packed | None = None  # instead of the weight, which then has no memory
        self.scale = scale

    @property
    def vocab_size(self) -> int:
        return self.share.whole

    @property
    def hidden_size(self) -> int:
        return self.weight.shape[1]

    def forward(self, ids: Tensor) -> Tensor:
        if self.ranks is None:
            return self._look_up(ids)
        ((begin, end),) = self.share.ranges
        is_own = (ids >= begin) & (ids < end)
        rows = self._look_up(torch.where(is_own, ids - begin, 0))
        return self.ranks.sum(torch.where(is_own[..., None], rows, 0))

    def holds_the_same_as(self, other: "Embedding") -> bool:
        """In whatever forms both are kept."""
        if self.weight.shape != other.weight.shape:
            return False
        chunks = torch.arange(len(self.weight), device=self.weight.device).split(CHUNK_ROWS)
        return all(torch.equal(self._look_up(ids), other._look_up(ids)) for ids in chunks)

    def _look_up(self, ids: Tensor) -> Tensor:
        # The scale is rounded to the weights' own precision first, as the models that have one were trained.
        if self.packed is None:
            return take_rows(self.weight, ids, self.scale)
        rows = look_up(self.weight, self.packed, ids)
        return rows if self.scale == 1.0 else rows * torch.tensor(self.scale, dtype=rows.dtype)


def embed_rows(embed: Embedding, batch: Batch) -> Tensor:
    """The embeddings of a batch's rows [T, H]; those of images come from the vision tower, at no scale."""
    x = embed(batch.input_ids)
    if batch.features is None or batch.features.values.shape[-1] != embed.hidden_size:
        return x
    is_image, values = batch.features.at(0)
    return torch.where(is_image, values.to(x.dtype), x)


class Head(nn.Module):
    """hidden [R, H] -> logits [R, V]; a tied head takes the embedding's own parameter. Split over ranks by ids, like an
    embedding: `own_logits` are those of a rank's own ids, and a call gathers all of them."""

    is_multiplied = True  # as a whole: its rows are not looked up

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tied: Embedding | None = None,
        softcap: float = 0.0,
        is_split: bool = True,
    ) -> None:
        super().__init__()
        self.share, num_rows = vocabulary_share(vocab_size) if is_split else (whole(vocab_size), vocab_size)
        ranks = current_ranks() if is_split else None
        if tied is not None:
            self.share, ranks = tied.share, tied.ranks
        self.weight = tied.weight if tied is not None else empty_matrix(num_rows, hidden_size)
        self.columns = None if ranks is None else Columns(ranks, self.share.ranges[0][0], num_rows, vocab_size)
        cut(self.weight, 0, self.share)
        self.packed: Packed | Quantised | None = None
        self.exact = False
        self.softcap = softcap

    @property
    def vocab_size(self) -> int:
        return self.share.whole

    @property
    def hidden_size(self) -> int:
        return self.weight.shape[1]

    def forward(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """`out`: where to put the logits."""
        if self.columns is None:
            return self._logits(hidden, out)
        logits = self.columns.gathered(self.own_logits(hidden))
        return logits if out is None else out.copy_(logits)

    def own_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden [R, H] -> [R, ids of this rank]; -inf where that is padding. All, where it is not split."""
        logits = self._logits(hidden, out)
        if self.columns is not None and self.share.size < logits.shape[1]:
            logits[:, self.share.size :] = -torch.inf
        return logits

    def _logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        if not self.softcap:
            return linear(hidden, self.weight, None, self.packed, exact=self.exact, out=out)
        logits = linear(hidden, self.weight, None, self.packed, exact=self.exact)
        return torch.mul(torch.tanh(logits / self.softcap), self.softcap, out=out)


class AbsentHead(nn.Module):
    """Stands for a head that lives on another rank."""

    weight, columns = None, None

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.vocab_size, self.hidden_size, self.softcap = head.vocab_size, head.hidden_size, head.softcap

    def forward(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        raise AssertionError("only the last stage has a head")

    own_logits = forward
