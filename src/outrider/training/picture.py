"""A run as a picture: loss, served accept length over time, acceptance by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.training.course import Result

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

WIDTH, HEIGHT, MARGIN = 520, 380, 20
LEFT, RIGHT, TOP, BOTTOM = 60, 16, 44, 40  # of a panel, around its axes
COLOURS = ((20, 110, 200), (210, 110, 20))
BLACK, GRID, WHITE = (30, 30, 30), (225, 225, 225), (255, 255, 255)
NUM_TICKS = 5

Line = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    title: str
    across: str
    lines: dict[str, Line]
    lowest: float | None = None  # of the upright axis; None: as the lines are


def draw(result: Result, path: Path) -> bool:
    """Whether there is a picture now."""
    if find_spec("PIL") is None:
        return False
    from PIL import Image, ImageDraw

    panels = panels_of(result)
    image = Image.new("RGB", (len(panels) * WIDTH + 2 * MARGIN, HEIGHT + 2 * MARGIN), WHITE)
    pen = ImageDraw.Draw(image)
    for number, panel in enumerate(panels):
        _draw(pen, panel, (MARGIN + number * WIDTH, MARGIN))
    image.save(path, format="PNG")
    return True


def panels_of(result: Result) -> list[Panel]:
    losses = [(entry["seconds"] / 60, entry["loss"]) for entry in result.losses]
    start = {name: [(0.0, each["accept_length"])] for name, each in result.before.by_temperature.items()}
    for entry in result.curve:
        for name, each in entry["by_temperature"].items():
            start[name].append((entry["seconds"] / 60, each["accept_length"]))
    shares = {
        f"T = {name}": list(enumerate(each["acceptance_per_position"], start=1))
        for name, each in result.best.by_temperature.items()
    }
    return [
        Panel("loss", "minutes", {"": losses}),
        Panel("served accept length", "minutes", {f"T = {name}": line for name, line in start.items()}, 1.0),
        Panel("acceptance by position", "draft token", {name: [(float(x), y) for x, y in line]
                                                         for name, line in shares.items()}, 0.0),
    ]  # fmt: skip


def _draw(pen: ImageDraw, panel: Panel, corner: tuple[int, int]) -> None:
    left, right = corner[0] + LEFT, corner[0] + WIDTH - RIGHT
    top, bottom = corner[1] + TOP, corner[1] + HEIGHT - BOTTOM
    points = [point for line in panel.lines.values() for point in line] or [(0.0, 0.0)]
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    low_y = min(y for _, y in points) if panel.lowest is None else panel.lowest
    high_y = max(y for _, y in points)
    wide, tall = max(high_x - low_x, 1e-9), max(high_y - low_y, 1e-9)
    pen.text((left, top - 30), panel.title, fill=BLACK)
    for number in range(NUM_TICKS + 1):
        share = number / NUM_TICKS
        x, y = left + share * (right - left), bottom - share * (bottom - top)
        pen.line([(left, y), (right, y)], fill=GRID)
        pen.text((left - 6, y), f"{low_y + share * tall:.2f}", fill=BLACK, anchor="rm")
        pen.text((x, bottom + 6), f"{low_x + share * wide:.3g}", fill=BLACK, anchor="ma")
    pen.text(((left + right) / 2, bottom + 22), panel.across, fill=BLACK, anchor="ma")
    for number, (name, line) in enumerate(panel.lines.items()):
        placed = [(left + (x - low_x) / wide * (right - left), bottom - (y - low_y) / tall * (bottom - top))
                  for x, y in line]  # fmt: skip
        for one, other in pairwise(placed):
            pen.line([one, other], fill=COLOURS[number % len(COLOURS)], width=2)
        pen.text((right, top - 30 + 14 * number), name, fill=COLOURS[number % len(COLOURS)], anchor="ra")
