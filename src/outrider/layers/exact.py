"""Exact mode: every layer of a model is told that a row's bits must not depend on its company."""

from dataclasses import replace

from torch import nn

from outrider.layers.attention import SelfAttention
from outrider.layers.embedding import Head
from outrider.layers.linear import Linear
from outrider.layers.mla import LatentAttention
from outrider.layers.moe import Experts
from outrider.layers.shared_attention import SharedAttention


def make_exact(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Linear | Head | Experts):
            module.exact = True
        if isinstance(module, SelfAttention | SharedAttention | LatentAttention):
            module.options = replace(module.options, exact=True)
