"""Layers in one native call: the same bits as one by one, between taps too."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.kernels import native_library
from outrider.layers import block, fused
from outrider.layers.attention import AttentionShape
from outrider.layers.fused import FusedRun

needs_native = pytest.mark.skipif(native_library.library() is None, reason="no C compiler, so no native kernels")
PROMPTS = [[5, 6, 7, 8, 5, 6], list(range(3, 40)), [9]]
PARAMS = SamplingParams(temperature=0.9, seed=3, max_tokens=10, logprobs=3, ignore_eos=True)


def said(path: Path, speculative: dict | None, monkeypatch: pytest.MonkeyPatch | None = None) -> tuple[list, int]:
    """Tokens with their probabilities, and how many layers were run fused."""
    with LLM(path, speculative, max_model_len=64) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        pieces = [piece for cut in llm.target._fused._cuts.values() for piece in cut]
        whole = max((piece.num_layers for piece in pieces if isinstance(piece, FusedRun)), default=0)
        return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs], whole


@needs_native
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_the_same_bits_as_step_by_step(
    family: str, target_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once, num_fused = said(target_path(family), None)
    assert num_fused > 1
    with monkeypatch.context() as patched:
        patched.setattr(AttentionShape, "is_plain", False)
        stepwise, none = said(target_path(family), None)
    assert none == 0
    assert at_once == stepwise


@needs_native
def test_taps_are_kept_on_the_way(target_path: Callable[..., Path], tmp_path: Path) -> None:
    """A pass with taps is one call too, or rounds that only follow a text would cost more than plain ones. That they
    are the right streams is what the drafters' references look at."""
    head = tiny.save_eagle3(tmp_path / "head")
    settings = {"method": "eagle3", "model": str(head), "force": True}
    plain, whole = said(target_path("llama"), None)
    drafted, with_taps = said(target_path("llama"), settings)
    assert drafted == plain
    assert with_taps == whole


def test_streams_that_nobody_needs_are_written_over(
    target_path: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer by layer a product's sum goes where the stream was, unless that is the embedding, or a tap."""
    settings = {"method": "eagle3", "model": str(tiny.save_eagle3(tmp_path / "head")), "force": True}
    wanted, _ = said(target_path("llama"), settings)
    for module in (fused, block):
        monkeypatch.setattr(module, "use_native", lambda x: False)
    with LLM(target_path("llama"), settings, max_model_len=64) as llm:
        assert llm.drafter is not None
        taps, stays = set(llm.drafter.taps), dict[int, set[bool]]()
        for number, layer in enumerate(llm.target.layers, start=1):

            def look(_: object, given: tuple, made: Tensor, number: int = number) -> None:
                stays.setdefault(number, set()).add(made.data_ptr() == given[0].data_ptr())

            layer.register_forward_hook(look)
        found = llm.generate(PROMPTS, PARAMS)
    assert [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in found] == wanted
    assert {False} in stays.values()
    assert {True} in stays.values()
    assert stays == {number: {number > 1 and number - 1 not in taps} for number in stays}
