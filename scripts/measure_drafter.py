"""How well a drafter drafts on prompts of the user's: accept length by file and temperature, and tokens a second.

python scripts/measure_drafter.py TARGET DRAFTER PROMPTS.jsonl ... [-k 7] [--limit 80] [--batches 1,8,32]
One JSON line on standard output, a table on standard error. Speed is of adaptive drafting against none, same prompts,
same process, greedy; accept length is of full drafts.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from outrider import LLM, SamplingParams
from outrider.llm import total_speculation
from outrider.training.conversations import read_conversations


def prompts_of(llm: LLM, path: Path, limit: int) -> list[list[int]]:
    found = []
    for conversation in read_conversations(path, limit):
        messages = [{"role": role, "content": content} for role, content in conversation.asked()[:1]]
        found.append(llm.chat_prompt(messages)["prompt_token_ids"])
    return found


def lengths(arguments: argparse.Namespace) -> dict[str, dict[str, object]]:
    settings = {"model": arguments.drafter, "num_speculative_tokens": arguments.k, "force": True}
    found: dict[str, dict[str, object]] = {}
    with LLM(arguments.target, settings, device=arguments.device) as llm:
        for path in arguments.prompts:
            prompts = prompts_of(llm, path, arguments.limit)
            for temperature in arguments.temperatures:
                params = SamplingParams(max_tokens=arguments.max_tokens, temperature=temperature, seed=1)
                total = total_speculation(llm.generate(prompts, params))
                shares = [round(share, 3) for share in total.acceptance_per_position]
                found[f"{path.stem} T={temperature:g}"] = {
                    "accept_length": round(total.accept_length, 3),
                    "rounds": total.rounds,
                    "acceptance_per_position": shares,
                }
                print(f"{path.stem:<16} T={temperature:<4g} {total.accept_length:.2f}  {shares}", file=sys.stderr)
    return found


def speeds(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Tokens a second by batch, plain and drafted; the second of two runs, prompts computed afresh."""
    found: dict[str, dict[str, float]] = {}
    sides = {
        "plain": None,
        "drafted": {"model": arguments.drafter, "num_speculative_tokens": arguments.k},
    }
    for side, settings in sides.items():
        options = {"device": arguments.device, "enable_prefix_caching": False, "max_num_seqs": max(arguments.batches)}
        with LLM(arguments.target, settings, **options) as llm:
            llm.warm_up()
            everything = [p for path in arguments.prompts for p in prompts_of(llm, path, arguments.limit)]
            for batch in arguments.batches:
                chosen = (everything * batch)[: batch * (2 if batch > 1 else 8)]
                params = SamplingParams(max_tokens=arguments.max_tokens, temperature=0, ignore_eos=True)
                for _ in range(2):
                    begin, tokens = time.perf_counter(), 0
                    for first in range(0, len(chosen), batch):
                        outputs = llm.generate(chosen[first : first + batch], params)
                        tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
                    rate = tokens / (time.perf_counter() - begin)
                found.setdefault(str(batch), {})[side] = round(rate, 1)
    for batch, rates in found.items():
        rates["speed_up"] = round(rates["drafted"] / rates["plain"], 3)
        print(f"batch {batch:<4} plain {rates['plain']:>9} drafted {rates['drafted']:>9} tokens/s  "
              f"{rates['speed_up']:.2f}x", file=sys.stderr)  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("drafter")
    parser.add_argument("prompts", type=Path, nargs="+")
    parser.add_argument("-k", type=int, default=7)
    parser.add_argument("--limit", type=int, default=80)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--temperatures", type=lambda text: [float(part) for part in text.split(",")], default=[0.0, 1.0]
    )
    parser.add_argument(
        "--batches", type=lambda text: [int(part) for part in text.split(",") if part], default=[1, 8, 32]
    )
    arguments = parser.parse_args()
    report = {"target": arguments.target, "drafter": arguments.drafter, "k": arguments.k, "accept": lengths(arguments)}
    if arguments.batches:
        report["speed"] = speeds(arguments)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
