"""Decoder blocks as native calls on a CPU: one block, or all that follow each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from outrider.kernels.activation import gelu_tanh_mul, silu_mul
from outrider.kernels.block import BlockShape, NativeBlock, NativeStack
from outrider.kernels.dispatch import use_native
from outrider.kernels.quantised import Quantised
from outrider.kernels.take import take_rows
from outrider.layers.attention import SelfAttention
from outrider.layers.mlp import GatedMLP
from outrider.layers.narrow import narrow, narrowed
from outrider.layers.norm import RMSNorm
from outrider.types import STREAM_IS_FREE, Batch, ReadRows

FOLLOWING = "the norm of the next layer"  # in a pass's memo


@dataclass(frozen=True)
class BlockParts:
    """What a block is made of, where the native one knows how to compute it."""

    attention: SelfAttention
    mlp: GatedMLP
    mlp_norm: RMSNorm
    attention_norm: RMSNorm | None = None  # None: the attention's input is given
    attended_norm: RMSNorm | None = None  # of what attention and MLP add to the residual
    fed_norm: RMSNorm | None = None


def block_parts(attention: nn.Module, mlp: nn.Module, mlp_norm: RMSNorm, **norms: RMSNorm) -> BlockParts | None:
    """What the native call needs of a block; None where something in it is only computed step by step."""
    if type(attention) is not SelfAttention or type(mlp) is not GatedMLP:
        return None
    if not attention.shape.is_plain or mlp.activation not in (silu_mul, gelu_tanh_mul):
        return None
    if attention.ranks is not None:  # their sums are between its parts
        return None
    same = all((norm.eps, norm.offset) == (mlp_norm.eps, mlp_norm.offset) for norm in norms.values())
    return BlockParts(attention, mlp, mlp_norm, **norms) if same else None


def native_block(parts: BlockParts) -> NativeBlock:
    attention, mlp, pages = parts.attention, parts.mlp, parts.attention.pages
    assert pages is not None, "the layer has no cache memory yet"
    q_norm, k_norm = attention.q_norm, attention.k_norm
    shape = BlockShape(
        num_heads=attention.shape.num_heads,
        window=attention.shape.window,
        eps=parts.mlp_norm.eps,
        head_eps=q_norm.eps if q_norm is not None else 0.0,
        scale=attention.options.scale,
        norm_offset=parts.mlp_norm.offset,
        head_offset=q_norm.offset if q_norm is not None else 0.0,
        gelu=mlp.activation is gelu_tanh_mul,
    )
    linears = {"qkv": attention.qkv, "output": attention.output, "gate_up": mlp.gate_up, "down": mlp.down}
    norms = {
        "q_norm": q_norm,
        "k_norm": k_norm,
        "mlp_norm": parts.mlp_norm,
        "attention_norm": parts.attention_norm,
        "attended_norm": parts.attended_norm,
        "fed_norm": parts.fed_norm,
    }
    vectors: dict[str, Tensor | None] = {f"{name}_bias": linear.bias for name, linear in linears.items()}
    vectors |= {name: norm.weight if norm is not None else None for name, norm in norms.items()}
    matrices = {}
    for name, linear in linears.items():
        assert not isinstance(linear.packed, Quantised), "that is for GPUs"
        matrices[name] = (linear.weight, linear.packed)
    return NativeBlock(shape, matrices, vectors, pages)


class Fusable(nn.Module):
    """A layer from the residual stream to the residual stream that may be computed as one native block."""

    @property
    def parts(self) -> BlockParts | None:
        raise NotImplementedError


class FusedLayers:
    """Layers of a model, cut where a pass wants the stream between them; what cannot be fused runs by itself."""

    def __init__(self) -> None:
        self._cuts: dict[tuple[int, ...], list[nn.Module | FusedRun]] = {}

    def forget(self) -> None:
        """Where the weights are: they have moved."""
        self._cuts = {}

    def __call__(
        self, layers: nn.ModuleList, x: Tensor, batch: Batch, taps: Iterable[int], read: ReadRows | None = None
    ) -> dict[int, Tensor]:
        """The residual stream [T, H] after so many layers: of all taps, and after the last. `read`: the rows of that
        which are read, None: all."""
        ends = tuple(sorted({*taps, len(layers)}))
        if not use_native(x):
            return _one_by_one(layers, x, batch, ends, read)
        if ends not in self._cuts:
            self._cuts[ends] = _cut(layers, ends)
        streams, number = {0: x}, 0
        for piece in self._cuts[ends]:
            if isinstance(piece, FusedRun):
                x, found = piece(x, batch)
                streams |= {number + count: tap for count, tap in zip(piece.taps, found, strict=True)}
                number += piece.num_layers
            else:
                x = piece(x, batch)
                number += 1
            if number in ends:
                streams[number] = x
        if read is not None:
            streams[number] = take_rows(x, read.rows)
        return streams


def _one_by_one(
    layers: nn.ModuleList, x: Tensor, batch: Batch, ends: Sequence[int], read: ReadRows | None
) -> dict[int, Tensor]:
    streams = {0: x}
    norms = [getattr(layer, "attention_norm", None) for layer in layers]
    for number, layer in enumerate(layers, start=1):
        batch.memo[FOLLOWING] = norms[number] if number < len(norms) else None
        batch.memo[STREAM_IS_FREE] = number > 1 and number - 1 not in ends  # a tap is never written to again
        if number == len(layers):
            narrow(batch, read)
        x = layer(x, batch)
        if number in ends:
            streams[number] = x
    streams[len(layers)] = narrowed(x, batch)
    batch.memo[STREAM_IS_FREE] = False
    return streams


def _cut(layers: nn.ModuleList, ends: Sequence[int]) -> list[nn.Module | FusedRun]:
    """Into runs of layers that can be fused, and the others."""
    pieces: list[nn.Module | FusedRun] = []
    run: list[BlockParts] = []
    for number, layer in enumerate([*layers, None], start=1):
        parts = layer.parts if isinstance(layer, Fusable) else None
        if parts is not None:
            run.append(parts)
            continue
        if run:
            first = number - 1 - len(run)
            pieces.append(FusedRun(run, [end - first for end in ends if first < end < number - 1]))
            run = []
        if layer is not None:
            pieces.append(layer)
    return pieces


class FusedRun:
    """Blocks that follow each other. Their addresses are packed again where their memory has moved."""

    def __init__(self, parts: Sequence[BlockParts], taps: Sequence[int] = ()) -> None:
        """taps: after how many of them the stream is wanted, beside where they end."""
        self._parts, self.taps = list(parts), list(taps)
        self._attentions = [each.attention for each in parts]
        self._rotaries = list({id(each.rotary): each.rotary for each in self._attentions}.values())
        self._pages: list[object] = []
        self._stack: NativeStack | None = None

    @property
    def num_layers(self) -> int:
        return len(self._parts)

    def __call__(self, x: Tensor, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
        pages = [attention.pages for attention in self._attentions]
        if self._stack is None or any(now is not then for now, then in zip(pages, self._pages, strict=True)):
            places = {id(rotary): number for number, rotary in enumerate(self._rotaries)}
            blocks = [native_block(parts) for parts in self._parts]
            self._stack = NativeStack(blocks, [places[id(each.rotary)] for each in self._attentions], self.taps)
            self._pages = list(pages)
        return self._stack(x, batch, [rotary(batch) for rotary in self._rotaries])
