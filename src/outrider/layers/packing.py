"""Finds the smaller, exact form of every matrix of a model, where there is one."""

from torch import Tensor, nn

from outrider.kernels.dispatch import use_native
from outrider.kernels.packed import pack
from outrider.layers.embedding import Head
from outrider.layers.linear import Linear


def packed_bytes(module: nn.Module) -> int:
    """What a pass reads of the weights: every parameter once, packed ones in their packed form."""
    packed = {layer.weight: layer.packed for layer in module.modules() if isinstance(layer, Linear | Head)}
    total = 0
    for parameter in module.parameters():
        form = packed.get(parameter)
        tensors: list[Tensor | None] = [parameter] if form is None else [form.data, form.scales]
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
    return total


def pack_weights(module: nn.Module) -> int:
    """Called once, after the weights are loaded. Returns how many matrices were packed."""
    count = 0
    for layer in module.modules():
        if isinstance(layer, Linear | Head) and use_native(layer.weight):
            layer.packed = pack(layer.weight.detach())
            count += layer.packed is not None
    return count
