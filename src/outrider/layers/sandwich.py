"""Gemma's decoder block: attention and MLP are normed on their way in and on their way out, then added to the
residual stream."""

from collections.abc import Sequence

from torch import Tensor, nn

from outrider.kernels.take import take_rows
from outrider.layers.attention import SelfAttention
from outrider.layers.block import attention_weights, mlp_weights
from outrider.layers.fused import FOLLOWING, BlockParts, Fusable, block_parts
from outrider.layers.mlp import GatedMLP
from outrider.layers.narrow import READ_ROWS
from outrider.layers.norm import RMSNorm
from outrider.types import Batch, Weight


class SandwichBlock(Fusable):
    """Subclasses may say what the feed-forward part answers (`feed`)."""

    def __init__(self, attention: nn.Module, mlp: GatedMLP, norms: Sequence[RMSNorm]) -> None:
        """norms: before attention, after it, before the MLP, after it."""
        super().__init__()
        self.attention = attention
        self.mlp = mlp
        self.attention_norm, self.attended_norm, self.mlp_norm, self.fed_norm = norms

    @property
    def parts(self) -> BlockParts | None:
        if type(self) is not SandwichBlock:
            return None
        attention_norm, attended_norm, fed_norm = self.attention_norm, self.attended_norm, self.fed_norm
        norms = {"attention_norm": attention_norm, "attended_norm": attended_norm, "fed_norm": fed_norm}
        return block_parts(self.attention, self.mlp, self.mlp_norm, **norms)

    def feed(self, x: Tensor, normed: Tensor | None) -> Tensor:
        """The residual stream [T, H], and what the MLP's norm makes of it if that is known -> what is normed and added
        to it."""
        return self.mlp(self.mlp_norm.on_the_way(x) if normed is None else normed)

    def _attended(self, attended: Tensor, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The residual stream of those rows that are read, with what attention adds to it; and what the MLP's norm
        makes of it, if that is known."""
        read = batch.memo.pop(READ_ROWS, None)
        if read is not None:
            attended, x = take_rows(attended, read.rows), take_rows(x, read.rows)
        return self.attended_norm.added_for(attended, x, self.mlp_norm)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        norm = self.attention_norm
        stream, inputs = batch.memo.pop(norm, (None, None))  # from the block before
        if inputs is None or stream is not x:
            inputs = norm.on_the_way(x) if isinstance(self.attention, SelfAttention) else norm(x)
        x, normed = self._attended(self.attention(inputs, batch), x, batch)
        # the next block's norm, if its input is this block's result as it is
        following = batch.memo.get(FOLLOWING) if type(self).forward is SandwichBlock.forward else None
        x, normed = self.fed_norm.added_for(self.feed(x, normed), x, following)
        if normed is not None:
            batch.memo[following] = (x, normed)
        return x


def sandwich_weights(block: SandwichBlock, source: str) -> dict[str, Weight]:
    """Checkpoint names of a block; `source` is e.g. "model.layers.3.". Of attention that is no SelfAttention the
    target's file says them."""
    weights = {
        "attention_norm.weight": Weight((f"{source}input_layernorm.weight",)),
        "attended_norm.weight": Weight((f"{source}post_attention_layernorm.weight",)),
        "mlp_norm.weight": Weight((f"{source}pre_feedforward_layernorm.weight",)),
        "fed_norm.weight": Weight((f"{source}post_feedforward_layernorm.weight",)),
    }
    if isinstance(block.attention, SelfAttention):
        weights |= attention_weights(block.attention, f"{source}self_attn.", "attention.")
    return weights | mlp_weights(block.mlp, f"{source}mlp.", "mlp.")
