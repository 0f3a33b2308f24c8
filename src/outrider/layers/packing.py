"""Finds the smaller, exact form of every matrix of a model, where there is one."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outrider.kernels import native
from outrider.kernels.dispatch import use_native
from outrider.kernels.packed import Packed, PackedStack, pack, pack_halves
from outrider.kernels.quantised import Kind, Quantised, QuantisedStack, quantise
from outrider.layers.block import Block
from outrider.layers.embedding import Embedding, Head
from outrider.layers.fused import FusedLayers
from outrider.layers.linear import Linear, give_memory, take_memory
from outrider.layers.moe import Experts

Form = Packed | PackedStack | Quantised | QuantisedStack

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
    layers = [layer for layer in module.modules() if isinstance(layer, Linear | Head | Embedding)]
    return [layer for layer in layers if not isinstance(layer, Head) or layer.is_multiplied]


def dense(layer: Linear | Head | Embedding) -> Tensor:
    """A layer's weight as numbers, in whatever form it is kept."""
    if isinstance(layer.packed, Quantised):
        return layer.packed.dense(torch.float32)
    return native.dense(layer.weight, layer.packed)


def numbers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter as numbers, one after the other: what is kept in another form takes its memory meanwhile."""
    layers = {layer.weight: layer for layer in packable(module) if layer.packed is not None}
    stacks = {parameter: form for routed in mixtures(module) for parameter, form in routed.packed.items()}
    for name, parameter in module.named_parameters():
        stack = stacks.get(parameter)
        if isinstance(stack, QuantisedStack):
            yield name, stack.dense(torch.float32)
        elif stack is not None:
            rows = parameter.new_empty(1).expand(stack.shape[0] * stack.shape[1], stack.shape[2])
            yield name, native.dense(rows, stack.matrix).view(stack.shape)
        else:
            yield name, dense(layers[parameter]) if parameter in layers else parameter.detach()


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
            if stack is not None:
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


@dataclass(frozen=True)
class Packing:
    """What becomes of a module's matrices on a CPU: where there is one, a smaller form that loses nothing."""

    parameters: frozenset[nn.Parameter]
    halves_only: bool  # it is small, and will not have the cache to itself: 16 bits cost no unpacking

    def packed(self, parameter: nn.Parameter) -> Packed | None:
        """Of a matrix that is filled, or of a stack, one below the other."""
        if parameter not in self.parameters:
            return None
        values = parameter.detach().flatten(0, -2)
        return pack_halves(values) if values.dtype != torch.float32 else pack(values, halves_only=self.halves_only)


def packing_of(module: nn.Module, min_bytes: int | None = None, *, halves: bool = False) -> Packing | None:
    """None where its matrices stay as they are. `halves`: of a small module too, those of 16 bits are kept so."""
    gains = gains_from_packing(module, min_bytes)
    found = [layer.weight for layer in packable(module) if layer.packed is None]
    for routed in mixtures(module):
        found += [parameter for parameter in (routed.up, routed.down) if parameter not in routed.packed]
    found = [parameter for parameter in found if use_native(parameter)]
    return Packing(frozenset(found), not gains) if (gains or halves) and found else None


def pack_weights(module: nn.Module, min_bytes: int | None = None, *, halves: bool = False) -> int:
    """Of a module that is filled. Returns how many matrices are packed now."""
    packing = packing_of(module, min_bytes, halves=halves)
    forms = {} if packing is None else {each: packing.packed(each) for each in packing.parameters}
    found = {parameter: form for parameter, form in forms.items() if form is not None}
    for parameter in found:
        take_memory(parameter)
    share_blocks(module, found)
    return len(found)


def refill(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """A filled model takes these weights, by the names of its parameters, in place: recordings of rounds stay valid.
    Other forms of its weights are made anew."""
    parameters = dict(module.named_parameters())
    given = {parameters[name] for name in values}
    with torch.inference_mode():
        for layer in module.modules():
            if isinstance(layer, Linear | Head | Embedding) and layer.weight in given:
                layer.packed = None
            elif isinstance(layer, Experts):
                layer.packed = {each: form for each, form in layer.packed.items() if each not in given}
            elif isinstance(layer, Block):
                layer._native = None
            fused = getattr(layer, "_fused", None)
            if isinstance(fused, FusedLayers):
                fused.forget()
        for name, value in values.items():
            give_memory(parameters[name])
            parameters[name].copy_(value)
        pack_weights(module, halves=True)
