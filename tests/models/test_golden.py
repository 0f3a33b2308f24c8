"""Every target against transformers: logits and every tap, in one pass, in chunks and token by token."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from harness import Harness, load_target

from outrider.models.base import targets

LENGTHS = (40, 23, 31)  # longer than every window
TEXT_IDS = 240  # ids from here on stand for images in the multimodal configs


def test_every_registered_target_has_a_family_here() -> None:
    covered = {family.registered for family in tiny.FAMILIES.values()}
    assert covered == set(targets), "add a tiny config to tests/tiny.py for the new target"


def stream_readers(model: Any) -> list[torch.nn.Module]:
    """The modules whose input is the residual stream: every layer, and the final norm."""
    text = model.model.language_model if "language_model" in dict(model.model.named_children()) else model.model
    children = dict(text.named_children())
    return [*children["layers"], children.get("norm_f", children.get("norm"))]


@pytest.mark.parametrize("chunk", [100, 7, 1])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_logits_and_taps(family: str, chunk: int, target_path: Callable[..., Path], kernels: str) -> None:
    model = tiny.reference(family)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, TEXT_IDS, (length,), generator=generator).tolist() for length in LENGTHS]
    results = Harness(load_target(target_path(family))).run(prompts, chunk)
    for prompt, (logits, taps) in zip(prompts, results, strict=True):
        # hooks, not output_hidden_states: transformers' last hidden state comes after the final norm
        streams: list[torch.Tensor] = []

        def keep(_: torch.nn.Module, args: tuple[Any, ...], named: dict[str, Any], kept: Any = streams) -> None:
            kept.append((args[0] if args else named["hidden_states"])[0])

        hooks = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in stream_readers(model)]
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([prompt])).logits[0]
        for hook in hooks:
            hook.remove()
        assert expected.std() > 0.3, "the reference says nothing, so agreeing with it means nothing"
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(taps, torch.stack(streams, dim=1), atol=1e-4, rtol=0)


def test_a_tap_is_not_written_to_again(target_path: Callable[..., Path]) -> None:
    harness = Harness(load_target(target_path("llama")))
    ((_, taps),) = harness.run([[5, 6, 7, 8]], 4)
    assert len({float(taps[0, i].sum()) for i in range(taps.shape[1])}) == taps.shape[1]
