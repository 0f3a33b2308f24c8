"""Which keys the rows of a drafted block see, layer by layer: of the context before it, and of the block itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.drafters.head import twin
from outrider.kernels.attention import AttentionOptions
from outrider.layers.attention import AttentionShape
from outrider.layers.block import DecoderBlock
from outrider.types import Batch


@dataclass(frozen=True)
class LayerMask:
    window: int  # 0: everything before is seen
    causal: bool  # a row of the block does not see those after it
    anchored: bool = False  # the window ends before the block's first row, and all rows see the same of the context

    def __post_init__(self) -> None:
        if not self.window:
            object.__setattr__(self, "anchored", False)

    @property
    def keys(self) -> int:
        """A window as attention counts it: keys up to a row's index, its own among them."""
        return self.window + 1 if self.anchored else self.window

    @property
    def both_ways(self) -> bool:
        """Whether attention asks the batch for the last key that a row sees. An anchored row's own index says only
        where its window begins."""
        return self.anchored or not self.causal

    def shape(self, shape: AttentionShape) -> AttentionShape:
        return replace(shape, window=self.keys, both_ways=self.both_ways)

    def options(self, options: AttentionOptions) -> AttentionOptions:
        return replace(options, window=self.keys, both_ways=self.both_ways)

    def rows(self, batch: Batch) -> Batch:
        """A block's batch as this layer takes it."""
        if not self.anchored:
            return batch
        assert batch.last_key is not None, "only rows of a block have an anchor"
        anchor = batch.last_key - (batch.max_rows - 1)
        return replace(batch, indices=anchor, last_key=batch.indices if self.causal else batch.last_key)


def remasked(block: DecoderBlock, mask: LayerMask) -> DecoderBlock:
    """The same layer, with its weights and cache memory, under another mask."""
    other, attention = twin(block), twin(block.attention)
    attention.shape, attention.options = mask.shape(attention.shape), mask.options(attention.options)
    other.attention = attention
    other._native = None
    return other
