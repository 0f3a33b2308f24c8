"""A line about a certificate.

outrider certify --json > F.json 2> F.err; python scripts/h200/certificate.py NAME F.json"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from common import say


def main(name: str, path: str, *, wanted: int) -> None:
    text = Path(path).read_text().strip()
    if not text:
        errors = Path(path).with_suffix(".err")
        lines = errors.read_text(errors="replace").split("\n") if errors.exists() else []
        said = " | ".join([line.strip() for line in lines if line.strip()][-6:])
        say(f"FAILED certify {name}: {said[-600:] or 'it said nothing'}")
        return
    found = json.loads(text.splitlines()[-1])
    counts, joining = found["counts"], [case for case in found["cases"] if case["composition"] == "joining"]
    enough = f"wanted >= {wanted:,}: {'reached' if counts['tokens'] >= wanted else 'MISSED'}; " if wanted else ""
    say(
        f"certify {name}: {found['verdict'].upper()}, {counts['tokens']:,} tokens compared ({enough}"
        f"{sum(case['tokens'] for case in joining):,} of them joining), {counts['mismatches']} differ, "
        f"log-probabilities by {found['largest_logprob_difference']:g}, {found['dtype']} on {found['device']}, exact "
        f"{found['exact']}"
    )
    say(
        f"  {counts['rounds']:,} rounds ({found['recorded_rounds']:,} batches recorded), accepted "
        f"{counts['accepted']:,}, rejected {counts['rejected']:,}, preempted {counts['preemptions']}, plain alone "
        f"and in company differ {found['control_mismatches']}, {found['seconds']:.0f} s "
        f"{str(found['first_divergence'] or '')[:200]}"
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], wanted=int(sys.argv[3]) if len(sys.argv) > 3 else 0)
