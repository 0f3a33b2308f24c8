"""Finds the smaller, exact form of every matrix of a model, where there is one."""

from torch import nn

from outrider.kernels.dispatch import use_native
from outrider.kernels.packed import pack
from outrider.layers.embedding import Head
from outrider.layers.linear import Linear


def pack_weights(module: nn.Module) -> int:
    """Called once, after the weights are loaded. Returns how many matrices were packed."""
    count = 0
    for layer in module.modules():
        if isinstance(layer, Linear | Head) and use_native(layer.weight):
            layer.packed = pack(layer.weight.detach())
            count += layer.packed is not None
    return count
