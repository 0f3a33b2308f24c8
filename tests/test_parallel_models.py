"""Every target split over ranks computes what it computes alone, and all ranks find the same bits."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from harness import Harness, load_target
from thread_ranks import on_ranks

from outrider.kernels.collective import Ranks
from outrider.layers.split import split_over

PROMPTS = [list(range(5, 45)), list(range(60, 83))]  # longer than every window
# 3 divides few sizes: as many heads as it needs
THREE = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}


def run(path: Path, chunk: int, ranks: Ranks | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    with split_over(ranks):
        return Harness(load_target(path)).run(PROMPTS, chunk)


def check(path: Path, size: int) -> None:
    expected = run(path, 100)
    found = on_ranks(size, lambda ranks: run(path, 100, ranks))
    for others in found[1:]:
        for (logits, taps), (first_logits, first_taps) in zip(others, found[0], strict=True):
            assert torch.equal(logits, first_logits)
            assert torch.equal(taps, first_taps)
    for (logits, taps), (whole_logits, whole_taps) in zip(found[0], expected, strict=True):
        for split, whole in ((logits, whole_logits), (taps, whole_taps)):
            torch.testing.assert_close(split, whole, atol=1e-5 * max(1.0, float(whole.abs().max())), rtol=0)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_two_ranks(family: str, target_path: Callable[..., Path]) -> None:
    check(target_path(family), 2)


@pytest.mark.parametrize("vocab_size", [257, 1000])
@pytest.mark.parametrize("tied", [False, True])
def test_any_vocabulary(tied: bool, vocab_size: int, target_path: Callable[..., Path]) -> None:
    path = target_path("llama", vocab_size=vocab_size, tie_word_embeddings=tied, **THREE)
    for size in (2, 3):
        check(path, size)
