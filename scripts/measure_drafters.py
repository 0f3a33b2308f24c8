"""What drafters of one target are worth, side by side: accept length, speed, proof.

python scripts/measure_drafters.py TARGET PROMPTS.jsonl ... --draft DIR [--draft NAME=DIR ...] --out FOLDER [-k 7]
- accept: tokens a round with K drafts, by prompt file and temperature
- speed: tokens a second with so many requests at a time, adaptive, greedy, all sides in turn in one process: plain,
  every drafter (efficiency: of the tokens that a round brings, the share that is won in time), and other engines
  (--against transformers-compiled,transformers-lookup, in batches of equal length; what is not installed is named and
  left out). Whoever ends makes room for the next; answers differ in length, so that prompts come one by one
- proof: `outrider certify --exact` on every pair
--only accept,speed does some of it; runs into the same folder complete each other's report. Progress goes to standard
error; FOLDER/drafters.json, drafters.md and two pictures are written as far as figures are there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from plot_results import COLOURS, Plot

from outrider import LLM, SamplingParams
from outrider.bench import peer_transformers  # noqa: F401  (they register themselves)
from outrider.bench.interleave import interleave, num_equal, paired_ratio
from outrider.bench.peers import PeerOptions, PeerUnavailable, open_peers, peers
from outrider.bench.prompts import PromptChoice
from outrider.bench.sides import OutriderSide, Side
from outrider.certify.proof import certify_config
from outrider.certify.questions import FULL, QUICK
from outrider.config import EngineConfig, SpeculativeConfig, batch_limits, device_of
from outrider.llm import total_speculation
from outrider.training.conversations import read_conversations

PARTS = ("accept", "speed", "proof")
CACHE_BYTES = 2 * 2**30  # of every engine, on a GPU: several stand beside each other
ROOM = 1024  # tokens of a prompt, at most


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def prompts_of(llm: LLM, path: Path, limit: int) -> list[list[int]]:
    """First turns, through the chat template of a target that has one, spread over the file."""
    conversations, tokenizer = read_conversations(path, None), llm.get_tokenizer()
    found = []
    for conversation in conversations[:: max(len(conversations) // limit, 1)][:limit]:
        role, content = conversation.asked()[0]
        if tokenizer.has_chat_template:
            ids = llm.chat_prompt([{"role": role, "content": content}])["prompt_token_ids"]
        else:
            ids = tokenizer.encode(content)
        if len(ids) <= ROOM:
            found.append(ids)
    return found


@contextmanager
def engine(
    arguments: argparse.Namespace, drafter: str | None, num_seats: int | None = None, **speculative: Any
) -> Iterator[LLM]:
    """`num_seats`: requests at a time; None: as many as there are."""
    settings = {"model": drafter, "num_speculative_tokens": arguments.k, **speculative} if drafter else None
    seats = num_seats or max(*arguments.batches, arguments.limit, 1)
    options: dict[str, Any] = {"max_num_seqs": seats, "device": arguments.device}
    if device_of(arguments.device).type == "cuda":
        options["kv_cache_memory"] = CACHE_BYTES
    length = ROOM + max(arguments.max_tokens, arguments.speed_tokens * 3 // 2) + arguments.k + 1
    with LLM(arguments.target, settings, max_model_len=length, enable_prefix_caching=False, **options) as llm:
        yield llm


class MixedLengths(OutriderSide):
    """Answers from half as long to one and a half times as long. Where all are equally long, those who began together
    end together unless something is drafted, and the prompts of those who come next are read at once: plain decoding
    would be compared in a state in which no user meets it."""

    def length(self, number: int, max_tokens: int) -> int:
        return max(max_tokens // 2 + 37 * number % (max_tokens + 1), 1)


def accept_lengths(arguments: argparse.Namespace, name: str, drafter: str) -> Iterator[dict[str, Any]]:
    """By prompt file and temperature, of full drafts."""
    with engine(arguments, drafter, force=True) as llm:
        for path in arguments.prompts:
            prompts, found = prompts_of(llm, path, arguments.limit), {}
            for temperature in arguments.temperatures:
                params = SamplingParams(max_tokens=arguments.max_tokens, temperature=temperature, seed=1)
                total = total_speculation(llm.generate(prompts, params))
                shares = [round(share, 3) for share in total.acceptance_per_position]
                figures = {"accept_length": round(total.accept_length, 3), "rounds": total.rounds, "positions": shares}
                found[f"{temperature:g}"] = figures
                say(f"{name:<12} {path.stem:<12} T={temperature:<4g} {total.accept_length:.2f}  {shares}")
            yield {name: {path.stem: found}}


def speeds(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """By requests at a time and side; ours first. Runs are taken in turn, and a side's ratio is to the plain run beside
    it."""
    for batch in arguments.batches:
        with ExitStack() as opened:
            plain = opened.enter_context(engine(arguments, None, batch))
            sides: list[Side] = [MixedLengths("plain", plain)]
            for name, drafter in arguments.draft.items():
                try:
                    sides.append(MixedLengths(name, opened.enter_context(engine(arguments, drafter, batch))))
                except ValueError as reason:  # it agrees with the target so little that the engine does not take it
                    say(f"{name} is left out: {reason}")
            spread = _spread(arguments, plain, batch)
            yield {str(batch): _race(arguments, sides, batch, [spread])}
    yield from _against(arguments)


def _against(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Other engines beside our plain decoding."""
    if not arguments.against:
        return
    with engine(arguments, None) as plain:
        ours: Side = OutriderSide("plain", plain)
        dtype, length = plain.target.embed.weight.dtype, ROOM + arguments.speed_tokens + 1
        known = PeerOptions(arguments.target, dtype, plain.config.torch_device, length, torch.get_num_threads())
        for peer in arguments.against:
            try:
                with ExitStack() as visiting:
                    (other,), _ = open_peers([peer], known)
                    visiting.callback(other.close)
                    for batch in arguments.batches if peer != "transformers-lookup" else [1]:  # which knows no batches
                        spread = _spread(arguments, plain, batch)
                        batches = [spread[first :: arguments.speed_batches] for first in range(arguments.speed_batches)]
                        found = _race(arguments, [ours, other], batch, batches)
                        yield {str(batch): {peer: found[peer]}}
            except (PeerUnavailable, RuntimeError, AttributeError, TypeError) as reason:  # of whatever version it is
                say(f"{peer} is left out: {reason}")


def _spread(arguments: argparse.Namespace, llm: LLM, batch: int) -> list[list[int]]:
    """Prompts from all files, for so many batches as a run has."""
    prompts = [ids for path in arguments.prompts for ids in prompts_of(llm, path, arguments.limit)]
    count = batch * arguments.speed_batches
    return (prompts[:: max(len(prompts) // count, 1)] * count)[:count]


def _race(
    arguments: argparse.Namespace, sides: Sequence[Side], batch: int, batches: Sequence[list[list[int]]]
) -> dict[str, Any]:
    records = interleave(sides, batches, arguments.speed_tokens, arguments.runs)
    found: dict[str, Any] = {}
    for record in records:
        ratio, speed = paired_ratio(record, records[0]), record.tokens_per_second
        found[record.name] = {
            "tokens_per_second": round(speed.median, 1),
            "times_plain": ratio.to_dict(),
            "same_answers": f"{num_equal(record, records[0])} of {len(record.tokens)}",
        }
        if record.speculation is not None:
            length = record.speculation.accept_length
            found[record.name] |= {"accept_length": round(length, 3), "efficiency": round(ratio.median / length, 3)}
        say(f"batch {batch:<4} {record.name:<24} {speed.median:>10,.0f} tokens/s  {ratio.median:.2f} of plain "
            f"({ratio.low:.2f}-{ratio.high:.2f}), same answers {found[record.name]['same_answers']}")  # fmt: skip
    return found


def proof(arguments: argparse.Namespace, drafter: str) -> dict[str, Any]:
    settings = SpeculativeConfig(model=drafter, num_speculative_tokens=arguments.k)
    limits = vars(batch_limits(arguments.device))
    if device_of(arguments.device).type == "cuda":
        limits |= {"kv_cache_memory": CACHE_BYTES}
    config = EngineConfig(arguments.target, settings, device=arguments.device, exact=True, **limits)
    certificate = certify_config(config, PromptChoice(None), QUICK if arguments.quick else FULL)
    counts = certificate.counts
    found = {"verdict": certificate.verdict, "accepted": counts.accepted, "rejected": counts.rejected,
             "mismatches": counts.mismatches, "doubts": certificate.doubts,
             "seconds": round(certificate.seconds, 1)}  # fmt: skip
    say(f"{Path(drafter).name:<12} certify --exact: {found}")
    return found


# what is written


class Report:
    """FOLDER/drafters.json and what is made of it; parts of several processes come together there."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.path = folder, folder / "drafters.json"
        self.facts = {"target": arguments.target, "k": arguments.k, "draft": arguments.draft}

    def add(self, part: str, figures: dict[str, Any]) -> None:
        known = json.loads(self.path.read_text()) if self.path.exists() else {}
        draft = {**known.get("draft", {}), **self.facts["draft"]}
        mine = known.get(part, {})
        merged = {**mine, **{name: {**mine.get(name, {}), **each} for name, each in figures.items()}}
        whole = {**known, **self.facts, "draft": draft, part: merged}
        self.path.write_text(json.dumps(whole, indent=1) + "\n")
        (self.folder / "drafters.md").write_text(table(whole))
        draw(whole, self.folder)


def table(whole: dict[str, Any]) -> str:
    """As a card in Markdown."""
    lines = []
    if accept := whole.get("accept"):
        columns = _columns(accept)
        lines += [f"Accept length, {whole['k']} drafts:", "", "| | " + " | ".join(map(_column, columns)) + " |"]
        lines.append("|---" * (len(columns) + 1) + "|")
        for name, sets in accept.items():
            cells = [
                f"{sets[file][at]['accept_length']:.2f}" if at in sets.get(file, {}) else "" for file, at in columns
            ]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    if speed := whole.get("speed"):
        names = list(dict.fromkeys(name for sides in speed.values() for name in sides))
        lines += [
            "",
            "Tokens a second (times plain; tokens a round as served, efficiency):",
            "",
            "| batch | " + " | ".join(names) + " |",
        ]
        lines.append("|---" * (len(names) + 1) + "|")
        for batch, sides in speed.items():
            known = [sides.get(name) for name in names]
            cells = [f"{s['tokens_per_second']:,.0f} ({_won(s)})" if s else "" for s in known]
            lines.append(f"| {batch} | {' | '.join(cells)} |")
    if proven := whole.get("proof"):
        lines += ["", "`outrider certify --exact`:", ""]
        lines += [f"- {name}: {each['verdict']}, {each['accepted']} drafts accepted, {each['rejected']} rejected"
                  for name, each in proven.items()]  # fmt: skip
    return "\n".join(lines) + "\n"


def _won(side: dict[str, Any]) -> str:
    times = f"{side['times_plain']['median']:.2f}"
    return f"{times}; {side['accept_length']:.2f} a round, {side['efficiency']:.2f}" if "efficiency" in side else times


def _columns(accept: dict[str, Any]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((file, at) for sets in accept.values() for file, found in sets.items() for at in found))


def _column(column: tuple[str, str]) -> str:
    return f"{column[0]}, T = {column[1]}"


def draw(whole: dict[str, Any], folder: Path) -> None:
    if accept := whole.get("accept"):
        columns = _columns(accept)
        lengths = {name: [s.get(f, {}).get(t, {}).get("accept_length", 0.0) for f, t in columns]
                   for name, s in accept.items()}  # fmt: skip
        places = [f"{file[:8]} {at}" for file, at in columns]
        _lines("Accept length", places, "prompts and temperature", lengths, folder / "accept.svg")
    if speed := whole.get("speed"):
        names = list(next(iter(speed.values())))
        ratios = {name: [s.get(name, {}).get("times_plain", {}).get("median", 0.0) for s in speed.values()]
                  for name in names}  # fmt: skip
        _lines("Tokens a second, times plain", list(speed), "batch", ratios, folder / "speed.svg")


def _lines(title: str, places: list[str], under: str, values: dict[str, list[float]], path: Path) -> None:
    top = max(int(max(map(max, values.values()))) + 1, 2)
    plot = Plot(title, places, under, top, list(range(top + 1)))
    for number, (name, each) in enumerate(values.items()):
        plot.line(name, each, COLOURS[number % len(COLOURS)])
    plot.level(1)
    plot.write(path)


def _numbers(kind: type) -> Any:
    return lambda text: [kind(part) for part in text.split(",") if part]


def parsed(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="a directory or a .gguf file")
    parser.add_argument("prompts", type=Path, nargs="+", help="chat JSONL")
    parser.add_argument("--draft", action="append", required=True, metavar="[NAME=]DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--only", type=_numbers(str), default=list(PARTS), metavar=",".join(PARTS))
    parser.add_argument("-k", type=int, default=7, help="tokens to draft")
    parser.add_argument("--limit", type=int, default=80, help="prompts of each file")
    parser.add_argument("--max-tokens", type=int, default=256, help="of each answer whose accept length is counted")
    parser.add_argument("--temperatures", type=_numbers(float), default=[0.0, 1.0])
    parser.add_argument("--batches", type=_numbers(int), default=[1, 8, 32])
    parser.add_argument("--speed-tokens", type=int, default=128, help="of an answer that is timed, on average")
    parser.add_argument("--speed-batches", type=int, default=6, help="times as many prompts in a run")
    parser.add_argument("--runs", type=int, default=3, help="runs of every side, taken in turn")
    parser.add_argument("--against", type=_numbers(str), default=["transformers-compiled", "transformers-lookup"])
    parser.add_argument("--quick", action="store_true", help="a short proof")
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args(given)
    if unknown := set(arguments.only) - set(PARTS):
        parser.error(f"--only knows {', '.join(PARTS)}, not {', '.join(sorted(unknown))}")
    if unknown := [name for name in arguments.against if name not in peers]:
        parser.error(f"--against knows no {', '.join(unknown)}: see outrider bench latency --help")
    named = [each.split("=", 1) if "=" in each else [Path(each).name, each] for each in arguments.draft]
    arguments.draft = dict(named)
    return arguments


def main() -> None:
    arguments = parsed()
    report = Report(arguments.out, arguments)
    for name, drafter in arguments.draft.items():
        for found in accept_lengths(arguments, name, drafter) if "accept" in arguments.only else ():
            report.add("accept", found)
    if "speed" in arguments.only:
        for found in speeds(arguments):
            report.add("speed", found)
    for name, drafter in arguments.draft.items():
        if "proof" in arguments.only:
            report.add("proof", {name: proof(arguments, drafter)})
    print(report.path.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
