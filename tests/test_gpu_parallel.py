"""Several ranks on CUDA devices: with one device for all of them, tensors travel through the host; with one for each,
by NCCL. Either way they say what one rank says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import drafter_settings
from test_parallel import PARAMS

from outrider import LLM, SamplingParams
from outrider.engine.workers import kept_workers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
PROMPTS = [[5, 6, 7, 8, 9] * 3, [40, 41], list(range(60, 90))]
OPTIONS: dict[str, Any] = {"device": "cuda", "max_model_len": 128, "max_num_seqs": 8, "gpu_memory_utilization": 0.3}


def said(path: Path, settings: Any, params: list[SamplingParams], **options: Any) -> list[list[int]]:
    with LLM(path, settings, **{**OPTIONS, **options}) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=["ranks", "stages"])
def test_two_processes(sizes: tuple[int, int], target_path: Callable[..., Path], tmp_path: Path) -> None:
    path = target_path("llama")
    both = {"tensor_parallel_size": sizes[0], "pipeline_parallel_size": sizes[1]}
    with kept_workers():
        expected = said(path, None, PARAMS, dtype="float32")
        assert said(path, None, PARAMS, dtype="float32", **both) == expected
        for method in ("eagle3", "dflash", "draft_model", "ngram"):
            settings = {**drafter_settings(method, tmp_path, target_path, "llama"), "adaptive": False}
            assert said(path, settings, PARAMS, dtype="float32", **both) == expected, method
        # where bits are coarse, plain and speculative are the same over the same ranks
        exact = {"dtype": "bfloat16", "exact": True, **both}
        settings = {**drafter_settings("eagle3", tmp_path, target_path, "llama"), "adaptive": False}
        assert said(path, settings, PARAMS, **exact) == said(path, None, PARAMS, **exact)
