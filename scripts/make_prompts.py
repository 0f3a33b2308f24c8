"""Writes prompts of our own making, as JSONL: what a drafter can be trained with where no data set is at hand.

python scripts/make_prompts.py OUT.jsonl [--count 20000] [--seed 0]. Requests come from the word lists of default_model;
a third of them go on with a second and a third turn.
"""

import argparse
import json
import random
from pathlib import Path

from default_model.prompts import requests

MORE = (
    "Make it shorter.", "Say that again in simpler words.", "Now write it as a list.", "Why?", "Give me another one.",
    "Can you explain the most important part?", "Write the same as a short poem.", "What would you do next?",
    "Continue.", "Now give a different example.", "Summarise that in one sentence.", "Thank you! Anything else?",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    pick, source = random.Random(arguments.seed), requests(arguments.seed)
    with arguments.out.open("w") as file:
        for _ in range(arguments.count):
            turns = [next(source).text]
            if pick.random() < 1 / 3:
                turns += pick.sample(MORE, 2)
            file.write(json.dumps({"turns": turns}) + "\n")


if __name__ == "__main__":
    main()
