"""A layer that remembers: it says what it needs (`spec`), and is given the memory (`bind`)."""

import torch
from torch import nn

from outrider.types import CacheSpec


class CachedLayer(nn.Module):
    def __init__(self, spec: CacheSpec) -> None:
        super().__init__()
        self.spec = spec
        self.pages: tuple[torch.Tensor, torch.Tensor] | None = None

    def bind(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """keys [P, page_size, heads, D], values [P, page_size, heads, D_v]."""
        self.pages = (keys, values)

    def unbind(self) -> None:
        self.pages = None


def cached_layers(module: nn.Module) -> list[CachedLayer]:
    return [layer for layer in module.modules() if isinstance(layer, CachedLayer)]
