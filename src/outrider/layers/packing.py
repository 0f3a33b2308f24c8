"""Finds the smaller, exact form of every matrix of a model, where there is one."""

from torch import Tensor, nn

from outrider.kernels.dispatch import use_native
from outrider.kernels.packed import pack
from outrider.layers.embedding import Head
from outrider.layers.linear import Linear

SMALL_MODEL = 64 * 2**20  # a model that stays in the cache gains nothing, and pays for the unpacking


def packed_bytes(module: nn.Module) -> int:
    """What a pass reads of the weights: every parameter once, packed ones in their packed form."""
    packed = {layer.weight: layer.packed for layer in module.modules() if isinstance(layer, Linear | Head)}
    total = 0
    for parameter in module.parameters():
        form = packed.get(parameter)
        tensors: list[Tensor | None] = [parameter] if form is None else [form.data, form.scales]
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
    return total


def pack_weights(module: nn.Module, min_bytes: int = SMALL_MODEL) -> int:
    """Called once, after the weights are loaded. Returns how many matrices were packed."""
    layers = [layer for layer in module.modules() if isinstance(layer, Linear | Head)]
    if sum(layer.weight.numel() * layer.weight.element_size() for layer in layers) < min_bytes:
        return 0
    count = 0
    for layer in layers:
        if use_native(layer.weight):
            layer.packed = pack(layer.weight.detach())
            count += layer.packed is not None
    return count
