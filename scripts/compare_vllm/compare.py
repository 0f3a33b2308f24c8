"""Compares what both sides wrote down, round by round, and prints a table:
python scripts/compare_vllm/compare.py DIRECTORY"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from sides import Case, load_cases


def compare(case: Case, ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[str, list[str]]:
    """A row of the table, and the differences in words."""
    rounds = equal = first = only_ours = only_theirs = 0
    differences: list[str] = []
    pairs = zip(ours["drafts"], theirs["drafts"], ours["texts"], theirs["texts"], strict=True)
    for number, (mine, other, text, their_text) in enumerate(pairs):
        if text != their_text:
            place = next(place for place, (a, b) in enumerate(zip(text, their_text, strict=False)) if a != b)
            differences.append(f"prompt {number}: the texts differ from token {place} on")
        for length in sorted(set(mine) | set(other), key=int):
            if int(length) >= len(text):
                continue  # nothing follows
            if length not in other:
                only_ours += 1
            elif length not in mine:
                only_theirs += 1
            else:
                common = min(len(mine[length]), len(other[length]))  # near the end, one of them may draft less
                rounds += 1
                equal += mine[length][:common] == other[length][:common]
                first += mine[length][0] == other[length][0]
                if mine[length][:common] != other[length][:common]:
                    differences.append(f"prompt {number} after {length}: {mine[length]} here, {other[length]} in vLLM")
    if only_ours or only_theirs:
        differences.append(f"rounds of one side only: {only_ours} here, {only_theirs} in vLLM")
    lengths = [accept_length(case, side) for side in (ours, theirs)]
    return f"| {case.name} | {rounds} | {equal} | {first} | {lengths[0]:.2f} | {lengths[1]:.2f} |", differences


def accept_length(case: Case, side: dict[str, Any]) -> float:
    """Tokens a round: after a draft, the next draft's place says how many were committed."""
    gains = []
    for drafts, text in zip(side["drafts"], side["texts"], strict=True):
        places = [*sorted(int(length) for length in drafts if int(length) < len(text)), len(text)]
        gains += [after - before for before, after in pairwise(places)]
    return sum(gains) / max(1, len(gains))


def main() -> None:
    directory = Path(sys.argv[1])
    ours = json.loads((directory / "outrider.json").read_text())
    print(
        "| case | rounds | drafts equal | first token equal | accept length here | in vLLM |\n|---|---|---|---|---|---|"
    )
    notes = []
    for case in load_cases(directory, sys.argv[2:]):
        path = directory / f"vllm-{case.name}.json"
        if not path.exists():
            continue
        theirs = json.loads(path.read_text())
        if "error" in theirs:
            print(
                f"| {case.name} | - | - | - | {accept_length(case, ours[case.name]):.2f} | {theirs['error'][:150]!r} |"
            )
            continue
        row, differences = compare(case, ours[case.name], theirs)
        print(row)
        notes += [f"{case.name}: {difference}" for difference in differences[:4]]
        notes += [f"{case.name}: and {len(differences) - 4} more"] if len(differences) > 4 else []
    print("\n".join(["", *notes]))


if __name__ == "__main__":
    main()
