"""The differential fuzz on a GPU: rounds are recorded there, two are under way at a time, and bits are exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fuzz_pairs import Pairs, told

from outrider.certify.fuzz import fuzz

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_in_random_worlds_everybody_is_told_the_same(tmp_path: Path) -> None:
    pairs = Pairs(tmp_path, "cuda")
    names = ("llama eagle3", "nemotron_h draft_model", "gpt_oss dflash", "qwen3 ngram")
    report = fuzz([pairs.pair(name) for name in names], seed=3, num_requests=120, records=True)
    assert report.failures == [], told(report)
    assert report.figures.recorded_rounds > 0
