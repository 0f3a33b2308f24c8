"""What sampling options cost on this machine: tokens/s of whole answers, by turns, beside greedy ones, without drafts
and with those of an n-gram drafter on a text that repeats.

    PYTHONPATH=src python scripts/measure_options.py MODEL ... [--batch 1 --batch 8] [--draft 7] [--threads 2]

Each model has a process of its own. Figures are medians, ratios to the greedy answers of the same turn."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from typing import Any

from outrider import LLM, Guided, SamplingParams

TEXT = "The fox went down to the river and saw a fish. The fish said hello to the fox. " * 3
DRAWN = {"temperature": 0.8, "seed": 1}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": DRAWN,
    "top_p": {**DRAWN, "top_p": 0.9},
    "min_p": {**DRAWN, "min_p": 0.05},
    "logprobs": {"logprobs": 5},
    "presence and frequency": {"presence_penalty": 0.01, "frequency_penalty": 0.01},
    "repetition": {"repetition_penalty": 1.01},
    "logit_bias": {"logit_bias": {5: 1.0}},
    "allowed_token_ids": {"allowed_token_ids": list(range(3, 30000))},
    "min_tokens": {"min_tokens": 4},
    "a grammar": {"guided": Guided(regex="[a-z ,.]{900}")},  # longer than any answer here
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--batch", type=int, action="append", help="answers at once; may be given several times")
    parser.add_argument("--draft", type=int, help="also with so many tokens of an n-gram drafter in every round")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    if len(given.models) > 1:
        for model in given.models:
            others = [word for word in sys.argv[1:] if word not in given.models]
            subprocess.run([sys.executable, __file__, model, *others], check=True)
        return
    for depth in [None] if given.draft is None else [None, given.draft]:
        for batch in given.batch or [1, 8]:
            measure(given, batch, depth)


def measure(given: argparse.Namespace, batch: int, depth: int | None) -> None:
    speculative = None
    if depth is not None:
        speculative = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": depth, "adaptive": False}
    (model,) = given.models
    with LLM(model, speculative, max_model_len=1024, max_num_seqs=batch, threads=given.threads) as llm:
        ids = llm.get_tokenizer().encode(TEXT)
        prompts = [{"prompt_token_ids": ids[number:]} for number in range(batch)]
        speeds: dict[str, list[float]] = {name: [] for name in OPTIONS}
        lengths: dict[str, float] = {}
        for turn in range(given.turns + 1):  # the first warms up
            for name, options in OPTIONS.items():
                params = SamplingParams(
                    **{"temperature": 0.0, "ignore_eos": True, "max_tokens": given.tokens, **options}
                )
                began = time.perf_counter()
                output = llm.generate(prompts, params)[0].outputs[0]
                if turn:
                    speeds[name].append(batch * given.tokens / (time.perf_counter() - began))
                lengths[name] = output.speculation.accept_length
    print(f"{model}, batch {batch}, {'plain' if depth is None else f'{depth} drafts'}:")
    for name, found in speeds.items():
        ratio = statistics.median(own / greedy for own, greedy in zip(found, speeds["greedy"], strict=True))
        told = "" if depth is None else f", {lengths[name]:.2f} tokens a round"
        print(f"  {name:24}{statistics.median(found):8.1f} tok/s, x {ratio:.2f}{told}", flush=True)


if __name__ == "__main__":
    main()
