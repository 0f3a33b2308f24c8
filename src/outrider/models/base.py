"""What every target is: embedding, a stack of layers, a final norm and a head, with taps collected in one loop.
A target file knows one architecture: its config, its network and its tensor names. It holds no speculative code."""

import re
from typing import Any, Self

import torch
from torch import Tensor, nn

from outrider.layers.embedding import Embedding, Head
from outrider.registry import Registry
from outrider.types import Batch, Hidden, Weight

targets: Registry[type["Target"]] = Registry("target architecture")


class Target(nn.Module):
    """Subclasses build `embed`, `layers`, `norm` and `head`, and say where weights come from."""

    embed: Embedding
    layers: nn.ModuleList
    norm: nn.Module
    head: Head
    ignored: tuple[str, ...] = (r"\.rotary_emb\.inv_freq$",)  # checkpoint tensors that carry nothing

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        return cls(config)

    @property
    def hidden_size(self) -> int:
        return self.embed.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.head.vocab_size

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def max_len(self) -> int:
        return int(self.config.get("max_position_embeddings") or 2048)

    def forward(self, batch: Batch, taps: tuple[int, ...] = ()) -> Hidden:
        """Runs the rows through all layers. Tap i is the residual stream after i layers; 0 is the embedding."""
        x = self.embed(batch.input_ids)
        streams = {0: x} if 0 in taps else {}
        for number, layer in enumerate(self.layers, start=1):
            x = layer(x, batch)  # a new tensor every time: a tap is never written to again
            if number in taps:
                streams[number] = x
        stacked = torch.stack([streams[tap] for tap in taps], dim=1) if taps else x.new_empty(len(x), 0, x.shape[-1])
        return Hidden(last=x, taps=stacked)

    def logits(self, last: Tensor) -> Tensor:
        """[R, H] before the final norm -> [R, V]."""
        return self.head(self.norm(last))

    def weights(self) -> dict[str, Weight]:
        """Every parameter's name, and the checkpoint tensors it is made of."""
        raise NotImplementedError

    def ignores(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.ignored)


def require(config: dict[str, Any], *keys: str) -> list[Any]:
    """The values of keys that an architecture cannot do without."""
    missing = [key for key in keys if config.get(key) is None]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    return [config[key] for key in keys]
