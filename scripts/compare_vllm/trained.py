"""Writes cases.json for drafters that were really trained: the same checkpoints run in both engines, and what each
accepts is counted. The other steps are those of the README:
python scripts/compare_vllm/trained.py DIRECTORY [NAME=METHOD:DRAFTER ...] [--target TARGET] [-k 5]
Without a drafter, those of the embedded default."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from sides import Case, save_cases
from tokenizers import Tokenizer

REPOSITORY = Path(__file__).resolve().parents[2]
DEFAULT = REPOSITORY / "src" / "outrider" / "default"
sys.path.insert(0, str(REPOSITORY / "scripts"))

from default_model.measure import CHAT_PROMPTS, RAW_PROMPTS  # noqa: E402

OWN = {"default": f"eagle3:{DEFAULT / 'drafter'}", "dflash": f"dflash:{DEFAULT / 'dflash'}"}


def prompts_of(target: Path, count: int) -> list[list[int]]:
    """A third of them beginnings of texts, a third messages, a third conversations longer than any window."""
    tokenizer, share = Tokenizer.from_file(str(target / "tokenizer.json")), count // 3
    chats = [f"<|user|>{text}<|end|><|assistant|>" for text in CHAT_PROMPTS]
    long = [" ".join(RAW_PROMPTS[first:] + RAW_PROMPTS[:first]) for first in range(share)]
    return [tokenizer.encode(text).ids[:180] for text in [*RAW_PROMPTS[:share], *chats[: count - 2 * share], *long]]


def speculative(method: str, drafter: str, depth: int) -> dict[str, object]:
    """In vLLM's words: P-EAGLE is EAGLE-3 that drafts in parallel."""
    settings: dict[str, object] = {"model": drafter, "num_speculative_tokens": depth}
    if method == "p_eagle":
        return {**settings, "method": "eagle3", "parallel_drafting": True}
    return {**settings, "method": method}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("drafters", nargs="*", help="NAME=METHOD:DIRECTORY")
    parser.add_argument("--target", type=Path, default=DEFAULT / "target")
    parser.add_argument("-k", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=20)
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    named = dict(each.split("=", 1) for each in arguments.drafters) or OWN
    prompts = prompts_of(arguments.target, arguments.prompts)
    vocab_size = json.loads((arguments.target / "config.json").read_text())["vocab_size"]
    cases = []
    for name, what in named.items():
        method, drafter = what.split(":", 1)
        settings = speculative(method, drafter, arguments.k)
        cases.append(Case(name, str(arguments.target), settings, prompts, vocab_size, guided=False))
    save_cases(arguments.directory, cases)


if __name__ == "__main__":
    main()
