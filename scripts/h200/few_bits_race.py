"""Outrider and vLLM on one GPU in 4 and 8 bits, engines alone: Llama-3.1-8B's shape, random weights, its head in 16
bits on both sides.

    PYTHONPATH=src:SITE python scripts/h200/few_bits_race.py [--vllm FOLDER] [int4] [fp8]

int4: W4A16, groups of 128. fp8: weights by channel; vLLM rounds activations too, as it does by default. --vllm: a
folder with vLLM, for PYTHONPATH; its engines start at the same time, and wait. A line for each batch: milliseconds that
one more token takes everybody, from answers of two lengths, medians of three; then how many times as fast we are."""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from common import SMOKE, TINY, attempt, free_memory, say, verdict

SHAPE = "llama-3.1-8b"
BATCHES = (1, 2) if SMOKE else (1, 8, 32)
CONTEXT, SHORT, LONG = (8, 4, 8) if SMOKE else (512, 32, 224)  # tokens of a prompt, and of two answers
NUM_RUNS = 3
GROUPS = {
    "int4": {"weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}},
    "fp8": {
        "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
        "input_activations": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True},
    },
}
FORMATS = {"int4": "pack-quantized", "fp8": "float-quantized"}
Answer = Callable[[int, int], float]  # batch, tokens of an answer -> seconds


def milliseconds(answer: Answer, batch: int) -> float:
    """Of one more token."""
    answer(batch, SHORT)
    runs = [(answer(batch, LONG) - answer(batch, SHORT)) / (LONG - SHORT) for _ in range(NUM_RUNS)]
    return 1e3 * statistics.median(runs)


def prompts(batch: int, vocabulary: int) -> list[list[int]]:
    return [[random.randrange(5, vocabulary) for _ in range(CONTEXT)] for _ in range(batch)]


def ours(kind: str) -> dict[int, float]:
    from outrider import SamplingParams
    from outrider.bench import random_pair
    from outrider.config import EngineConfig
    from outrider.engine.request import Request
    from outrider.engine.warm_up import warm_up
    from outrider.layers.packing import round_matrices

    random_pair.round_matrices = partial(round_matrices, head=False)
    config = EngineConfig(
        SHAPE,
        None,
        max_num_seqs=BATCHES[-1],
        max_model_len=CONTEXT + LONG + 8,
        quantization=None if SMOKE else kind,
        enable_prefix_caching=False,
    )
    shape = TINY if SMOKE else random_pair.shape_of(SHAPE)
    engine = random_pair.random_engine(config, shape)
    warm_up(engine)

    def answer(batch: int, count: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        asked = [Request(str(n), ids, params, seed=n) for n, ids in enumerate(prompts(batch, shape["vocab_size"]))]
        begin = time.perf_counter()
        for request in asked:
            engine.add(request)
        while not all(request.finished for request in asked):
            engine.step()
        return time.perf_counter() - begin

    found = {batch: milliseconds(answer, batch) for batch in BATCHES}
    engine.close()
    free_memory()
    return found


class Theirs:
    """vLLM in a process of its own."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        where = {"PYTHONPATH": str(folder), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
        more = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--as-vllm", str(self._checkpoint())],
            env={**os.environ, **where, **more},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _checkpoint(self) -> Path:
        """No weights: vLLM makes some up."""
        from outrider.bench.random_pair import shape_of

        group = {"targets": ["Linear"], **GROUPS[self.kind]}
        settings = {"quant_method": "compressed-tensors", "format": FORMATS[self.kind], "ignore": ["lm_head"]}
        settings |= {"config_groups": {"group_0": group}, "quantization_status": "compressed"}
        folder = Path(tempfile.mkdtemp())
        about = {"model_type": "llama", "torch_dtype": "bfloat16", "tie_word_embeddings": False, "hidden_act": "silu"}
        config = {**about, **shape_of(SHAPE), "quantization_config": settings}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    def wait(self) -> None:
        self._hear("ready")

    def measure(self) -> dict[int, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        found = json.loads(self._hear("{"))
        self._process.wait(30)
        return {int(batch): ms for batch, ms in found.items()}

    def _hear(self, beginning: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(beginning):
                return line
        raise RuntimeError(f"vLLM ended with status {self._process.wait()}")


def as_vllm(model: str) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=CONTEXT + LONG + 8,
        max_num_seqs=BATCHES[-1],
        gpu_memory_utilization=0.25,
        kv_cache_memory_bytes=6 * 2**30,  # else it takes what others use meanwhile for its own
        enable_prefix_caching=False,
        compilation_config={"cudagraph_capture_sizes": list(BATCHES)},
    )
    print("ready", flush=True)
    sys.stdin.readline()

    def answer(batch: int, count: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": ids} for ids in prompts(batch, 120_000)]
        begin = time.perf_counter()
        llm.generate(asked, params, use_tqdm=False)
        return time.perf_counter() - begin

    print(json.dumps({batch: milliseconds(answer, batch) for batch in BATCHES}), flush=True)


def race(kind: str, other: Theirs | None) -> None:
    found = ours(kind)
    beside = other.measure() if other is not None else {}
    for batch, ms in found.items():
        line = f"{kind}, batch {batch}: Outrider {ms:.3f} ms"
        if batch in beside:
            times = beside[batch] / ms
            line += f", vLLM {beside[batch]:.3f} ms: {times:.2f} times as fast ({verdict(times, 1.0, at_least=True)})"
        say(line)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", choices=[[], *GROUPS], help="all, if none is named")
    parser.add_argument("--vllm", type=Path, metavar="FOLDER")
    parser.add_argument("--as-vllm", metavar="MODEL", help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.as_vllm:
        as_vllm(arguments.as_vllm)
        return
    kinds = arguments.kinds or list(GROUPS)
    others = {kind: Theirs(kind, arguments.vllm) for kind in kinds} if arguments.vllm is not None else {}
    for kind, other in list(others.items()):
        try:
            other.wait()
            say(f"vLLM with {kind} is ready")
        except RuntimeError as reason:
            say(f"FAILED vLLM with {kind}: {reason}")
            del others[kind]
    for kind in kinds:
        attempt(kind, partial(race, kind, others.get(kind)))


if __name__ == "__main__":
    main()
