"""The one-call native block has the same bits as the same kernels called one by one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import Harness, load_target

from outrider.kernels import native_library
from outrider.layers import block
from outrider.layers.packing import pack_weights


@pytest.mark.skipif(native_library.library() is None, reason="no C compiler, so no native kernels")
@pytest.mark.parametrize("family", ["llama", "llama3", "mistral", "qwen2", "qwen3"])
def test_one_call_has_the_same_bits(
    family: str, target_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [list(range(10, 40)), [7, 8, 9], list(range(60, 75))]
    target = load_target(target_path(family))
    whole = Harness(target).run(prompts, 4)
    monkeypatch.setattr(block, "use_native", lambda x: False)
    apart = Harness(target).run(prompts, 4)
    for (logits, taps), (expected_logits, expected_taps) in zip(whole, apart, strict=True):
        assert torch.equal(logits, expected_logits)
        assert torch.equal(taps, expected_taps)


@pytest.mark.skipif(native_library.library() is None, reason="no C compiler, so no native kernels")
def test_packed_weights_have_the_same_bits(target_path: Callable[..., Path]) -> None:
    target = load_target(target_path("qwen2"))
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.copy_(parameter.bfloat16().float())
    prompts = [list(range(10, 40)), [7, 8, 9]]
    plain = Harness(target).run(prompts, 4)
    with torch.inference_mode():
        assert pack_weights(target) == 0, "too small to be worth it"
        assert pack_weights(target, min_bytes=0) == 4 * target.num_layers + 2
    packed = Harness(target).run(prompts, 4)
    for (logits, taps), (expected_logits, expected_taps) in zip(packed, plain, strict=True):
        assert torch.equal(logits, expected_logits)
        assert torch.equal(taps, expected_taps)


@pytest.mark.skipif(native_library.library() is None, reason="no C compiler, so no native kernels")
def test_logits_do_not_depend_on_the_rows_beside(target_path: Callable[..., Path]) -> None:
    """Whole prompts, chunks and single tokens, alone or together: the same bits."""
    target = load_target(target_path("llama"))
    prompts = [list(range(10, 47)), [7, 8, 9, 10, 11], list(range(60, 85))]
    together = [Harness(target).run(prompts, chunk) for chunk in (64, 6, 1)]
    alone = [Harness(target).run([prompt], 64)[0] for prompt in prompts]
    for results in together:
        for (logits, taps), (expected_logits, expected_taps) in zip(results, alone, strict=True):
            assert torch.equal(logits, expected_logits)
            assert torch.equal(taps, expected_taps)
