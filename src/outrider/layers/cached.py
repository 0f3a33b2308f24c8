"""Layers that remember: they say what they need (`spec`), and are given the memory (`bind`)."""

import torch
from torch import Tensor, nn

from outrider.types import CacheSpec, Recurrent


class CachedLayer(nn.Module):
    """Remembers something of every token, in pages."""

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__()
        self.spec = spec
        self.page_dtype: torch.dtype | None = None  # None: the model's own
        self.pages: tuple[Tensor, Tensor] | None = None

    def bytes_per_token(self, itemsize: int) -> int:
        """`itemsize`: of the model's own type."""
        return self.spec.bytes_per_token(itemsize if self.page_dtype is None else self.page_dtype.itemsize)

    def bind(self, keys: Tensor, values: Tensor) -> None:
        """keys [P, page_size, heads, D], values [P, page_size, heads, D_v]."""
        self.pages = (keys, values)

    def unbind(self) -> None:
        self.pages = None


class RecurrentLayer(nn.Module):
    """Remembers states of fixed size; several of each for every slot, until a verdict says which one holds, and
    snapshots of some, for texts that begin alike."""

    def __init__(self, spec: Recurrent) -> None:
        super().__init__()
        self.spec = spec
        self.states: tuple[Tensor, ...] | None = None
        self.snapshots: tuple[Tensor, ...] | None = None

    def bind(self, states: tuple[Tensor, ...], snapshots: tuple[Tensor, ...] | None = None) -> None:
        """One tensor [S, E, ...] float32 for each of the spec's shapes; of snapshots [C, ...]."""
        self.states, self.snapshots = states, snapshots

    def unbind(self) -> None:
        self.states = self.snapshots = None


def cached_layers(module: nn.Module) -> list[CachedLayer]:
    return [layer for layer in module.modules() if isinstance(layer, CachedLayer)]


def recurrent_layers(module: nn.Module) -> list[RecurrentLayer]:
    return [layer for layer in module.modules() if isinstance(layer, RecurrentLayer)]
