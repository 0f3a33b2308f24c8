"""Mamba-2: a recurrent mixer. What it remembers of a text has a fixed size, and every token changes it for good."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from outrider.kernels.activation import silu_mul
from outrider.kernels.mamba import MambaWeights, mamba
from outrider.kernels.norm import rms_norm
from outrider.layers.cached import RecurrentLayer
from outrider.layers.linear import Linear
from outrider.layers.split import cut, equal_share
from outrider.types import Batch, Recurrent, Weight


@dataclass(frozen=True)
class Mamba2Shape:
    hidden_size: int
    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int  # heads of a group share what they write by and what they read by
    kernel: int  # inputs that the convolution sees, the row's own included
    eps: float
    bias: bool = False  # of both projections
    conv_bias: bool = True

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def states(self) -> Recurrent:
        conv = (self.kernel - 1, self.conv_size)
        return Recurrent((conv, (self.num_heads, self.state_size, self.head_dim)))


class Mamba2(RecurrentLayer):
    """Split over ranks by groups, with their heads."""

    def __init__(self, shape: Mamba2Shape) -> None:
        groups = equal_share(shape.num_groups, "n_groups")
        heads = groups * (shape.num_heads // shape.num_groups)
        inner, states = heads * shape.head_dim, groups * shape.state_size
        channels = inner + states + states
        shape = replace(shape, num_heads=heads.size, num_groups=groups.size)
        super().__init__(shape.states)
        self.shape = shape
        self.input = Linear(shape.hidden_size, inner + channels + heads, bias=shape.bias)
        self.conv = nn.Parameter(torch.empty(shape.kernel, shape.conv_size))
        self.conv_bias = nn.Parameter(torch.empty(shape.conv_size)) if shape.conv_bias else None
        self.step_bias, self.rate, self.skip = (
            nn.Parameter(torch.empty(shape.num_heads, dtype=torch.float32)) for _ in range(3)
        )
        self.norm = nn.Parameter(torch.empty(shape.inner_size))
        self.output = Linear(inner, shape.hidden_size, bias=shape.bias)
        cut(self.conv, 1, channels)
        cut(self.norm, 0, inner)
        if self.conv_bias is not None:
            cut(self.conv_bias, 0, channels)
        for each in (self.step_bias, self.rate, self.skip):
            cut(each, 0, heads)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        assert self.states is not None, "the layer has no cache memory yet"
        conv_states, states = self.states
        projected = self.input(x)  # [T, gate | channels of the convolution | steps]
        weights = MambaWeights(
            self.conv, self.conv_bias, self.step_bias, self.rate, self.skip, num_groups=self.shape.num_groups
        )
        mixed = mamba(projected, (conv_states, states), batch, weights, self.snapshots)
        gate = projected[:, : self.shape.inner_size].float()
        gated = silu_mul(torch.cat([gate, mixed], dim=-1))
        groups = gated.unflatten(-1, (self.shape.num_groups, -1))  # each is normed by itself
        normed = rms_norm(groups, None, self.shape.eps).flatten(1) * self.norm.float()
        return self.output(normed.to(x.dtype))


def mamba2_weights(layer: Mamba2, source: str, name: str) -> dict[str, Weight]:
    """Checkpoint names as the original implementation gives them; `source` is e.g. "backbone.layers.3.mixer."."""
    weights = {
        f"{name}input.weight": Weight((f"{source}in_proj.weight",)),
        f"{name}conv": Weight((f"{source}conv1d.weight",), _by_tap),
        f"{name}step_bias": Weight((f"{source}dt_bias",)),
        f"{name}rate": Weight((f"{source}A_log",), _rate),
        f"{name}skip": Weight((f"{source}D",)),
        f"{name}norm": Weight((f"{source}norm.weight",)),
        f"{name}output.weight": Weight((f"{source}out_proj.weight",)),
    }
    if layer.conv_bias is not None:
        weights[f"{name}conv_bias"] = Weight((f"{source}conv1d.bias",))
    if layer.shape.bias:
        weights[f"{name}input.bias"] = Weight((f"{source}in_proj.bias",))
        weights[f"{name}output.bias"] = Weight((f"{source}out_proj.bias",))
    return weights


def _by_tap(tensors: list[Tensor]) -> Tensor:
    """[C, 1, kernel] -> [kernel, C]."""
    return tensors[0].squeeze(1).T


def _rate(tensors: list[Tensor]) -> Tensor:
    """The logarithm of how fast a head forgets -> the factor in the exponent, negative."""
    return -tensors[0].float().exp()
