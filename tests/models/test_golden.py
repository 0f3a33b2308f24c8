"""Every target against transformers: logits and every tap, in one pass, in chunks and token by token."""

import functools
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


def prompts_of_all_lengths() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, TEXT_IDS, (length,), generator=generator).tolist() for length in LENGTHS]


@functools.lru_cache(maxsize=1)  # tests of a family follow each other
def expected(family: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The logits and the residual streams of each prompt, as transformers has them."""
    model, found = tiny.reference(family), []
    streams: list[torch.Tensor] = []

    def keep(_: torch.nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        streams.append((args[0] if args else named["hidden_states"])[0].clone())

    # hooks, not output_hidden_states: transformers' last hidden state comes after the final norm
    for module in stream_readers(model):
        module.register_forward_pre_hook(keep, with_kwargs=True)
    for prompt in prompts_of_all_lengths():
        streams.clear()
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt])).logits[0]
        found.append((logits, torch.stack(streams, dim=1)))
    return found


@pytest.mark.parametrize("chunk", [100, 7, 1])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_logits_and_taps(family: str, chunk: int, target_path: Callable[..., Path], kernels: str) -> None:
    results = Harness(load_target(target_path(family))).run(prompts_of_all_lengths(), chunk)
    for (logits, taps), (their_logits, streams) in zip(results, expected(family), strict=True):
        assert their_logits.std() > 0.3, "the reference says nothing, so agreeing with it means nothing"
        torch.testing.assert_close(logits, their_logits, atol=1e-4, rtol=0)
        torch.testing.assert_close(taps, streams, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_rows_that_nobody_reads(family: str, target_path: Callable[..., Path], kernels: str) -> None:
    """They are left out of the last layer. What those after them see of them, and the taps, must be there."""
    chunk, prompts = 7, prompts_of_all_lengths()
    results = Harness(load_target(target_path(family))).run(prompts, chunk, narrow=True)
    for prompt, (logits, taps), (their_logits, streams) in zip(prompts, results, expected(family), strict=True):
        ends = [min(start + chunk, len(prompt)) - 1 for start in range(0, len(prompt), chunk)]
        torch.testing.assert_close(logits, their_logits[ends], atol=1e-4, rtol=0)
        torch.testing.assert_close(taps, streams[:, :-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3", "deepseek_v3"])
@pytest.mark.parametrize("kernels", ["reference"], indirect=True)
def test_the_last_mlp_has_only_rows_that_are_read(family: str, target_path: Callable[..., Path], kernels: str) -> None:
    target, seen = load_target(target_path(family)), dict[int, int]()
    for number in (-2, -1):
        mlp = target.layers[number].mlp
        mlp.register_forward_pre_hook(lambda _, args, number=number: seen.update({number: len(args[0])}))
    Harness(target).run(prompts_of_all_lengths(), 100, narrow=True)
    assert seen == {-2: sum(LENGTHS), -1: len(LENGTHS)}


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("kernels", ["reference"], indirect=True)
def test_the_last_attention_has_only_rows_that_are_read(
    family: str, target_path: Callable[..., Path], kernels: str
) -> None:
    """Of its queries: keys and values of all rows are kept."""
    target, seen = load_target(target_path(family)), dict[int, int]()
    for number in (-2, -1):
        output = target.layers[number].attention.output
        output.register_forward_pre_hook(lambda _, args, number=number: seen.update({number: len(args[0])}))
    Harness(target).run(prompts_of_all_lengths(), 100, narrow=True)
    assert seen == {-2: sum(LENGTHS), -1: len(LENGTHS)}


def test_a_tap_is_not_written_to_again(target_path: Callable[..., Path]) -> None:
    harness = Harness(load_target(target_path("llama")))
    ((_, taps),) = harness.run([[5, 6, 7, 8]], 4)
    assert len({float(taps[0, i].sum()) for i in range(taps.shape[1])}) == taps.shape[1]
