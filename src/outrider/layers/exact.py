"""Exact mode: every layer of a model is told that a row's bits must not depend on its company."""

from dataclasses import replace

from torch import nn

from outrider.kernels.attention import AttentionOptions
from outrider.layers.embedding import Head
from outrider.layers.linear import Linear


def make_exact(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Linear | Head):
            module.exact = True
        options = vars(module).get("options")
        if isinstance(options, AttentionOptions):
            module.options = replace(options, exact=True)
