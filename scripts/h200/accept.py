"""The embedded pair's accept length with pages in 16 and in 8 bits, and how far such a figure strays by itself.

    PROMPTS="mt_bench.jsonl gsm8k.jsonl" PYTHONPATH=src python scripts/h200/accept.py

Prompts: first turns of these files (chat JSONL), or, without any, those that the embedded head has learnt from. It
knows what the target says to the latter almost by heart: whatever stirs the target's numbers leads it away from that,
and the accept length falls, which it does not elsewhere (docs/diary.md).

Answers of a small model are chaotic: a last bit that differs changes a token sooner or later, and all that follows. So
every engine is asked several times: for the same answers in other company, where products round differently, and for
answers to other prompts. What pages of 8 bits change is judged by the same passes without.

It is judged in float32. In bfloat16 one in forty of this pair's tokens is a tie of two logits, and ties make drafts
stand more often: the accept length is 5 % larger than the model's own, and whatever stirs its logits takes some of that
away (docs/diary.md). The same in bfloat16 is told behind it."""

from __future__ import annotations

import os
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import SMOKE, say

from outrider import LLM, SamplingParams
from outrider.pair import DEFAULT_DIRECTORY
from outrider.sampling_params import Speculation
from outrider.training.conversations import read_conversations

K = 5
FILES = [Path(name) for name in os.environ.get("PROMPTS", "").split()]
NUM_PROMPTS, NUM_TOKENS, AT_ONCE = (6, 12, 6) if SMOKE else (512, 128, 128)
MOST_LETTERS = 600  # of a prompt: contexts of the embedded pair are short
WANTED = 0.01  # of the accept length in 16 bits


@dataclass(frozen=True)
class Pass:
    name: str
    seed: int = 7  # of the prompts
    at_once: int = AT_ONCE  # requests; others wait until all of them have ended
    backwards: bool = False


SAME = [Pass("all"), Pass("backwards", backwards=True), Pass("40 at once", at_once=AT_ONCE * 5 // 16)]
PASSES = [*SAME, Pass("other prompts", seed=8), Pass("more prompts", seed=9)]


def prompts_of(each: Pass) -> list[str]:
    if FILES:
        known = [conversation.asked()[0][1] for path in FILES for conversation in read_conversations(path, None)]
        prompts = random.Random(each.seed).sample([text for text in known if len(text) < MOST_LETTERS], NUM_PROMPTS)
    else:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from default_model.prompts import requests

        source = requests(each.seed)
        prompts = [next(source).text for _ in range(NUM_PROMPTS)]
    return prompts[::-1] if each.backwards else prompts


def answered(llm: LLM, each: Pass) -> list[Speculation]:
    """How drafting went for each of the prompts."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    chats = [[{"role": "user", "content": text}] for text in prompts_of(each)]
    size = NUM_PROMPTS if each.at_once == AT_ONCE else each.at_once
    outputs = [
        output for first in range(0, len(chats), size) for output in llm.chat(chats[first : first + size], params)
    ]
    return [output.outputs[0].speculation or Speculation() for output in outputs]


def measured(dtype: str, pages: str, passes: Sequence[Pass]) -> list[list[Speculation]]:
    settings = {"model": str(DEFAULT_DIRECTORY / "drafter"), "num_speculative_tokens": K, "force": True}
    if not SMOKE:
        settings["kv_cache_dtype"] = pages
    kind = {} if SMOKE else {"dtype": dtype, "kv_cache_dtype": pages}
    with LLM(speculative_config=settings, max_num_seqs=AT_ONCE, enable_prefix_caching=False, **kind) as llm:
        return [answered(llm, each) for each in passes]


def accept_length(found: Sequence[Speculation]) -> float:
    return sum(found, Speculation()).accept_length


def change_and_error(before: Sequence[Speculation], after: Sequence[Speculation]) -> tuple[float, float]:
    """By how much the accept length of the same prompts differs, of what it was; and the standard error of it, if
    prompts are drawn by chance."""
    first, second = accept_length(before), accept_length(after)

    def parts(found: Sequence[Speculation], mean: float) -> list[float]:
        rounds = sum(each.rounds for each in found)
        return [each.rounds * (each.accept_length - mean) / rounds for each in found]

    pairs = zip(parts(before, first), parts(after, second), strict=True)
    return second / first - 1, sum((b / second - a / first) ** 2 for a, b in pairs) ** 0.5


def accept() -> None:
    for dtype, passes in (("float32", PASSES), ("bfloat16", [*PASSES[:1], *PASSES[len(SAME) :]])):
        whole = measured(dtype, "auto", passes)
        lengths = [accept_length(each) for each in whole]
        same = [length for each, length in zip(passes, lengths, strict=True) if each in SAME]
        say(
            f"embedded pair, {dtype}: accept length {statistics.mean(lengths):.3f}, "
            f"{sum(each.rounds for each in whole[0]):,} rounds a pass; the same prompts in other company stray by "
            f"{statistics.pstdev(same) / lengths[0]:.2%} ({' '.join(f'{each:.3f}' for each in lengths)})"
        )
        small = measured(dtype, "fp8", passes)
        changes = [change_and_error(before, after) for before, after in zip(whole, small, strict=True)]
        for each, after, (change, error) in zip(passes, small, changes, strict=True):
            say(f"  pages in fp8, {each.name}: {accept_length(after):.3f}, {change:+.2%} +- {error:.2%}")
        change = statistics.mean(change for change, _ in changes)
        doubt = statistics.stdev(change for change, _ in changes) / len(changes) ** 0.5
        verdict = "reached" if abs(change) <= WANTED else "MISSED"
        if abs(change) > WANTED and abs(change) <= WANTED + 2 * doubt:
            verdict = "within doubt"
        judged = f"wanted within 1 %: {verdict}" if dtype == "float32" else "logits tie"
        say(f"embedded pair, {dtype}, pages in fp8: {change:+.2%} +- {doubt:.2%} over {len(changes)} passes ({judged})")


if __name__ == "__main__":
    accept()
