"""What the scripts of this folder share: lines with the seconds so far, parts of which none ends the others, and tiny
shapes for a machine without a GPU (`SMOKE=1`)."""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

SMOKE = os.environ.get("SMOKE", "") not in ("", "0")
BEGIN = float(os.environ.get("BEGIN") or time.time())  # the shell script's
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
}


def say(line: str) -> None:
    print(f"{time.time() - BEGIN:6.1f} {line}", flush=True)


def verdict(value: float, wanted: float, *, at_least: bool) -> str:
    """The wanted value beside a figure, and whether it was reached."""
    reached = value >= wanted if at_least else value <= wanted
    return f"wanted {'>=' if at_least else '<='} {wanted:g}: {'reached' if reached else 'MISSED'}"


def attempt(name: str, part: Callable[[], None]) -> None:
    """What fails is told, in two lines, and ends nothing else."""
    try:
        part()
    except Exception as error:
        say(f"FAILED {name}: {type(error).__name__}: {str(error)[:300]}")
        last = traceback.extract_tb(sys.exc_info()[2])[-1]
        say(f"  at {last.filename}:{last.lineno} {last.name}")
    free_memory()


def free_memory() -> None:
    """Of engines that nobody knows any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def roomy_folder(num_bytes: float) -> Path:
    """In memory where there is room for it."""
    memory = Path("/dev/shm")
    room = shutil.disk_usage(memory).free if memory.is_dir() else 0
    return Path(tempfile.mkdtemp(dir=memory if room > num_bytes else None))


def smoke_shape(**changes: object) -> str:
    """A file with the config of a tiny Llama, for whatever takes a shape."""
    path = Path(tempfile.mkdtemp()) / "config.json"
    path.write_text(json.dumps(TINY | changes))
    return str(path)
