"""Ends for texts that were cut: a closing line for a story, a greeting and a name for a letter."""

import random
import re

STORY_ENDINGS = [
    "In the end, everyone was happy.",
    "And they lived happily ever after.",
    "From that day on, they were good friends.",
    "It was a good day, and they all went home with a smile.",
    "That night, they all slept well.",
    "They never forgot that day.",
    "And so the day came to a happy end.",
    "Then it was time to go home.",
]
LETTER_ENDINGS = ["Your friend,", "With love,", "Best wishes,", "See you soon,"]
SENDER = re.compile(r"from (\w+) to|My name is (\w+)|Sign it with (\w+)")


def with_ending(kind: str, prompt: str, text: str, pick: random.Random) -> str | None:
    """The cut text with an end of its kind; None where a cut text of this kind is of no use."""
    if kind == "story":
        return f"{text} {pick.choice(STORY_ENDINGS)}"
    if kind == "letter":
        sender = next(filter(None, SENDER.search(prompt).groups()))
        return f"{text}\n\n{pick.choice(LETTER_ENDINGS)}\n{sender}"
    return None if kind == "listing" else text
