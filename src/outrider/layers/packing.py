"""Finds the smaller, exact form of every matrix of a model, where there is one."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from outrider.kernels.dispatch import use_native
from outrider.kernels.packed import BFLOAT16, Packed, pack
from outrider.kernels.quantised import Kind, Quantised, QuantisedStack, quantise
from outrider.layers.block import Block
from outrider.layers.embedding import Embedding, Head
from outrider.layers.linear import Linear, take_memory
from outrider.layers.moe import Experts

Form = Packed | Quantised | QuantisedStack

SMALL_MODEL = 64 * 2**20  # a model that stays in the cache gains nothing, and pays for the unpacking


def packed_bytes(module: nn.Module) -> int:
    """What a pass reads of the weights: every parameter once, packed ones in their packed form."""
    packed = read_forms(module)
    total = 0
    for parameter in module.parameters():
        form = packed.get(parameter)
        total += parameter.numel() * parameter.element_size() if form is None else form.num_bytes
    return total


def read_forms(module: nn.Module) -> dict[nn.Parameter, Form]:
    """The smaller forms that a pass reads; an embedding is looked up."""
    forms: dict[nn.Parameter, Form] = {}
    for layer in packable(module):
        if layer.packed is not None and not isinstance(layer, Embedding):
            forms[layer.weight] = layer.packed
    for routed in mixtures(module):
        forms |= routed.packed
    return forms


def held_bytes(*modules: nn.Module) -> int:
    """What the weights take in memory, in all their forms; what modules share counts once."""
    parameters = {parameter for module in modules for parameter in module.parameters()}
    forms: dict[nn.Parameter, Form | None] = {
        layer.weight: layer.packed for module in modules for layer in packable(module)
    }
    for module in modules:
        for routed in mixtures(module):
            forms |= routed.packed
    stored = {parameter.data_ptr(): parameter.untyped_storage().nbytes() for parameter in parameters}
    return sum(stored.values()) + sum(form.num_bytes for form in forms.values() if form is not None)


def packable(module: nn.Module) -> list[Linear | Head | Embedding]:
    """Layers that can do with another form of their weight."""
    return [layer for layer in module.modules() if isinstance(layer, Linear | Head | Embedding)]


def mixtures(module: nn.Module) -> list[Experts]:
    """Experts, whose stacks can be kept in another form."""
    return [layer for layer in module.modules() if isinstance(layer, Experts)]


def gains_from_packing(module: nn.Module, min_bytes: int | None = None) -> bool:
    """Whether it is large enough."""
    layers = [layer for layer in module.modules() if isinstance(layer, Linear | Head)]
    total = sum(layer.weight.numel() * layer.weight.element_size() for layer in layers)
    return total >= (SMALL_MODEL if min_bytes is None else min_bytes)


def share_blocks(module: nn.Module, blocks: Mapping[nn.Parameter, Packed | Quantised]) -> None:
    """Gives every layer the blocks of its weight, whoever else has it too."""
    for layer in packable(module):
        found = blocks.get(layer.weight)
        if found is not None and not (isinstance(layer, Embedding) and isinstance(found, Quantised)):
            layer.packed = found
    for routed in mixtures(module):
        for parameter in (routed.up, routed.down):
            stack = blocks.get(parameter)
            if isinstance(stack, Quantised):
                routed.keep(parameter, stack)


def round_matrices(module: nn.Module, kind: Kind, *, head: bool = True) -> None:
    """Those of a model that is filled; where one has no such form, it stays as it is. `head`: that too."""
    looked_up = {layer.weight for layer in packable(module) if isinstance(layer, Embedding)}
    kinds = (Linear, Head) if head else Linear
    for layer in packable(module):
        if isinstance(layer, kinds) and layer.weight not in looked_up:
            layer.packed = quantise(layer.weight.detach(), kind)
            if layer.packed is not None:
                take_memory(layer.weight)
    round_experts(module, kind)


def round_experts(module: nn.Module, kind: Kind) -> None:
    """Those of a model that is filled; where one has no such form, it stays as it is."""
    for routed in mixtures(module):
        for parameter in {routed.up, routed.down} - set(routed.packed):
            form = quantise(parameter.detach(), kind)
            if form is not None:
                routed.keep(parameter, form)
                take_memory(parameter)


def pack_weights(module: nn.Module, min_bytes: int | None = None, *, halves: bool = False) -> int:
    """Called once, after the weights are loaded. Returns how many matrices were packed. `halves`: those of a smaller
    module too, where they are bfloat16, which costs no unpacking: it will not have the cache to itself."""
    gains = gains_from_packing(module, min_bytes)
    if not gains and not halves:
        return 0
    count = 0
    for layer in module.modules():
        if isinstance(layer, Linear | Head) and layer.packed is None and use_native(layer.weight):
            form = pack(layer.weight.detach())
            if form is not None and (gains or form.kind == BFLOAT16):
                layer.packed = form
                count += 1
    return count


def refill(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """A filled model takes these weights, by the names of its parameters, in place: recordings of rounds stay valid.
    Other forms of its weights are made anew."""
    parameters = dict(module.named_parameters())
    halves = any(isinstance(layer, Linear | Head) and _is_halves(layer.packed) for layer in module.modules())
    with torch.inference_mode():
        for name, value in values.items():
            parameters[name].copy_(value)
        for layer in module.modules():
            if isinstance(layer, Linear | Head):
                layer.packed = None
            elif isinstance(layer, Block):
                layer._native = None
        pack_weights(module, halves=halves)


def _is_halves(form: Form | None) -> bool:
    return isinstance(form, Packed) and form.kind == BFLOAT16
