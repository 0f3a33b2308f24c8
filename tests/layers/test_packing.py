"""Small models beside large ones: what is bfloat16 at heart is kept so, whatever their size."""

import pytest
import torch

from outrider import LLM
from outrider.kernels.native_library import library
from outrider.kernels.packed import BFLOAT16, Packed
from outrider.layers.linear import Linear
from outrider.layers.packing import pack_weights, refill

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler, so no native kernels")


def kinds(module: torch.nn.Module) -> set[int | None]:
    forms = [layer.packed for layer in module.modules() if isinstance(layer, Linear)]
    return {form.kind if isinstance(form, Packed) else None for form in forms}


def test_a_drafter_reads_half_as_much_as_it_holds() -> None:
    """The embedded one, which the target would crowd out of the cache; and other weights in its place, too."""
    with LLM(None, "auto", device="cpu") as llm:
        drafter = llm.drafter
        assert drafter is not None
        assert (kinds(llm.target), kinds(drafter)) == ({None}, {BFLOAT16})
        name, layer = next((n, each) for n, each in drafter.named_modules() if isinstance(each, Linear))
        value = torch.randn(layer.weight.shape).bfloat16()
        refill(drafter, {f"{name}.weight": value})
        assert kinds(drafter) == {BFLOAT16}
        with torch.inference_mode():
            x = torch.randn(3, layer.weight.shape[1])
            torch.testing.assert_close(layer(x), x @ value.float().T, rtol=1e-4, atol=1e-4)


def test_what_would_have_to_be_unpacked_is_left_alone() -> None:
    layers = torch.nn.Sequential(Linear(64, 32), Linear(64, 32))
    halves, levels = torch.randn(32, 64).bfloat16().float(), torch.randint(0, 16, (32, 64)).float()
    levels[:, ::32], levels[:, 1::32] = 0.0, 15.0
    with torch.inference_mode():
        for layer, value in zip(layers, (halves, levels * 0.0713 - 0.5), strict=True):
            layer.weight.copy_(value)
        assert pack_weights(layers) == 0
        assert pack_weights(layers, halves=True) == 1
    assert kinds(layers) == {BFLOAT16, None}
