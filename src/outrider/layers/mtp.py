"""A multi-token-prediction module: some decoder blocks that see the next token's embedding and a hidden state."""

from collections.abc import Sequence

from torch import Tensor, nn

from outrider.layers.embedding import Embedding, Head
from outrider.layers.linear import Linear
from outrider.layers.narrow import run_narrowing
from outrider.layers.norm import RMSNorm, side_by_side
from outrider.types import Batch


class MtpModule(nn.Module):
    def __init__(
        self, norms: Sequence[RMSNorm], blocks: Sequence[nn.Module], head: Head | None, embed: Embedding | None
    ) -> None:
        """norms: of the embedding, of the hidden state, and the last one. Without a head or an embedding of its own
        it uses the target's."""
        super().__init__()
        self.embedding_norm, self.hidden_norm, self.norm = norms
        (size,) = self.norm.weight.shape
        self.projection = Linear(2 * size, size)
        self.blocks = nn.ModuleList(blocks)
        self.head = head
        self.embed = embed

    def forward(self, embedding: Tensor, hidden: Tensor, batch: Batch, rows: Tensor | None = None) -> Tensor:
        """embedding of the next token and hidden state [T, H] -> the residual stream before the module's norm, of these
        rows (None: of all)."""
        x = self.projection(side_by_side((self.embedding_norm, embedding), (self.hidden_norm, hidden)))
        return run_narrowing(self.blocks, x, batch, rows)
