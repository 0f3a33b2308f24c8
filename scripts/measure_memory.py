"""What a model takes in memory on a CPU, and how fast it is there: after loading, at most while loading, and after
answers, beside the size of its files; and how much of that is no page of a file, so that nobody else could have it.

    PYTHONPATH=src python scripts/measure_memory.py MODEL ... [--draft DRAFTER] [--batches 1,8] [--texts 9]
    PYTHONPATH=src python scripts/measure_memory.py --write FOLDER

The second writes checkpoints with random weights to measure: a Llama of SmolLM2-135M's shape and a mixture, in bfloat16
and float16, with projections in 4 bits and in fp8.

Each model has a process of its own. Requests are random tokens, no two alike, greedy."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file, save_file

PROMPT, ANSWER = 32, 64  # tokens
ROUNDED: dict[str, dict[str, Any]] = {
    "int4": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True},
    "fp8": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--texts", type=int, default=9, help="answers after which memory is looked at once more")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--write", type=Path, metavar="FOLDER")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.write is not None:
        write(given.write)
    elif given.here:
        print(json.dumps(measured(given)), flush=True)
    else:
        for model in given.models:
            others = [part for part in sys.argv[1:] if Path(part) not in given.models]
            subprocess.run([sys.executable, __file__, str(model), *others, "--here"], check=True)


def measured(given: argparse.Namespace) -> dict[str, Any]:
    from outrider import LLM, SamplingParams

    (model,) = given.models
    process, before = psutil.Process(), time.perf_counter()
    speculative = {"model": str(given.draft), "num_speculative_tokens": 5, "force": True} if given.draft else None
    with LLM(model, speculative, max_model_len=2048, max_num_seqs=max(map(int, given.batches.split(",")))) as llm:
        found: dict[str, Any] = {"model": str(model), "file_mb": megabytes(size_of(model))}
        found |= {"load_s": round(time.perf_counter() - before, 2), "loaded_mb": megabytes(process.memory_info().rss)}
        found |= {"at_most_mb": megabytes(peak())}
        generator = torch.Generator().manual_seed(0)

        def answer(count: int) -> float:
            """Tokens a second."""
            ids = torch.randint(3, llm.target.vocab_size, (count, PROMPT), generator=generator).tolist()
            begin = time.perf_counter()
            params = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)
            llm.generate([{"prompt_token_ids": each} for each in ids], params)
            return count * ANSWER / (time.perf_counter() - begin)

        answer(1)
        found |= {"after_an_answer_mb": megabytes(process.memory_info().rss)}
        for _ in range(given.texts - 1):
            answer(1)
        after = process.memory_info()
        found |= {f"after_{given.texts}_mb": megabytes(after.rss), "of_no_file_mb": megabytes(after.rss - after.shared)}
        for batch in map(int, given.batches.split(",")):
            answer(batch)
            found[f"tokens_per_s_{batch}"] = round(statistics.median(answer(batch) for _ in range(given.runs)), 1)
        return found


def megabytes(size: int) -> float:
    return round(size / 1e6, 1)


def size_of(model: Path) -> int:
    files = [model] if model.is_file() else [*model.glob("*.safetensors")]
    return sum(file.stat().st_size for file in files)


def peak() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def write(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

    llama = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    mixture = Qwen3MoeConfig(
        vocab_size=32000, hidden_size=512, intermediate_size=1024, moe_intermediate_size=256, num_hidden_layers=12,
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, num_experts=32, num_experts_per_tok=4,
        max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    for name, config in (("llama", llama), ("mixture", mixture)):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for dtype in ("float16", "bfloat16"):
            model.to(getattr(torch, dtype)).save_pretrained(folder / f"{name}-{dtype}")
        for kind, weights in ROUNDED.items():
            write_rounded(folder / f"{name}-bfloat16", folder / f"{name}-{kind}", kind, weights)
        print(*sorted(folder.glob(f"{name}-*")), sep="\n")


def write_rounded(source: Path, place: Path, kind: str, weights: dict[str, Any]) -> None:
    """As compressed-tensors stores projections of so few bits."""
    place.mkdir(exist_ok=True)
    config, stored = json.loads((source / "config.json").read_text()), {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = tensor
            continue
        groups = tensor.float().unflatten(1, (-1, weights.get("group_size", tensor.shape[1])))
        scale = (groups.abs().amax(2, keepdim=True) / (7 if kind == "int4" else 448)).bfloat16()
        steps, stem = (groups / scale.float()).flatten(1), name.removesuffix(".weight")
        stored[f"{stem}.weight_scale"] = scale[..., 0].contiguous()
        if kind == "fp8":
            stored[name] = steps.clamp(-448, 448).to(torch.float8_e4m3fn)
            continue
        words = (steps.round().clamp(-8, 7).long() + 8).unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
        stored[f"{stem}.weight_packed"] = words.sum(2).to(torch.int32)
        stored[f"{stem}.weight_shape"] = torch.tensor(tensor.shape)
    layout = {"int4": "pack-quantized", "fp8": "float-quantized"}[kind]
    described = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "format": layout}
    config["quantization_config"] = {"quant_method": "compressed-tensors", **described}
    (place / "config.json").write_text(json.dumps(config))
    save_file(stored, place / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    main()
