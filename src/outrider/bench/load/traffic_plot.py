"""Traffic as a picture: tokens a second, time to first token and time per output token by level, as a PNG. Drawn with
Pillow, which the vision extra brings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.extras import extra_missing

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont, ImageFont

PANEL_WIDTH, PANEL_HEIGHT, MARGIN = 560, 420, 24
LEFT, RIGHT, TOP, BOTTOM = 78, 20, 44, 46  # of a panel, around its axes
HEAD = 64
COLOURS = {"plain": (110, 110, 110), "speculative": (20, 110, 200)}
BLACK, GRID, BAD, WHITE = (30, 30, 30), (225, 225, 225), (205, 40, 40), (255, 255, 255)
DASH = 6
PANELS = (
    ("output tokens/s", "tokens_per_second", ("median",)),
    ("time to first token, ms", "ttft_ms", ("median", "p99")),
    ("time per output token, ms", "tpot_ms", ("median", "p99")),
)
Point = tuple[float, float]


def check_plot() -> None:
    """A ValueError with the remedy where pictures cannot be drawn."""
    try:
        import PIL.ImageDraw  # noqa: F401
    except ImportError as error:
        raise extra_missing("a plot", "vision", error) from error


@dataclass(frozen=True)
class Series:
    """One line of a panel; a gap where nothing was measured."""

    side: str
    values: list[float | None]
    dashed: bool


def draw(report: dict[str, Any], path: Path) -> None:
    """Writes the picture of a report of `outrider bench traffic`."""
    from PIL import Image, ImageDraw

    size = (len(PANELS) * PANEL_WIDTH + 2 * MARGIN, HEAD + PANEL_HEIGHT + MARGIN)
    image = Image.new("RGB", size, WHITE)
    pen = ImageDraw.Draw(image)
    _head(pen, report)
    for number, (title, name, parts) in enumerate(PANELS):
        panel = Panel(pen, (MARGIN + number * PANEL_WIDTH, HEAD), _marks(report["levels"]))
        panel.draw(title, series_of(report["levels"], name, parts))
        if name == "tokens_per_second":
            panel.mark([bool(level.get("is_under_plain")) for level in report["levels"]])
    image.save(path, format="PNG")


def series_of(levels: Sequence[dict[str, Any]], name: str, parts: Sequence[str]) -> list[Series]:
    """The lines of one figure: a solid median, a dashed 99th percentile."""
    lines = []
    for side in (side for side in COLOURS if side in levels[0]):
        found = [level[side][name] for level in levels]
        lines += [Series(side, [each and each[part] for each in found], dashed=part != "median") for part in parts]
    return lines


def _marks(levels: Sequence[dict[str, Any]]) -> list[str]:
    return [f"{level['clients'] if level['clients'] is not None else level['request_rate']:g}" for level in levels]


def _head(pen: ImageDraw, report: dict[str, Any]) -> None:
    made_up = "" if report["accept_length"] is None else f" (accept length {report['accept_length']:g}, made up)"
    title = (
        f"{report['model']}, {report['dtype']} on {report['device']}, drafter {report['drafter'] or 'none'}{made_up}"
    )
    by = "clients" if report["arrivals"] == "clients" else "requests a second"
    asked = f"by {by}; prompts of {report['prompt_tokens']} tokens, answers of {report['answer_tokens']}"
    pen.text((MARGIN, 12), title, fill=BLACK, font=_font(20))
    pen.text((MARGIN, 38), f"{asked}; solid: median, dashed: 99th percentile", fill=BLACK, font=_font(14))


class Panel:
    """Axes with lines. Levels stand at equal distances, whatever their numbers."""

    def __init__(self, pen: ImageDraw, corner: tuple[int, int], marks: Sequence[str]) -> None:
        self._pen, self._marks = pen, marks
        self._left, self._right = corner[0] + LEFT, corner[0] + PANEL_WIDTH - RIGHT
        self._top, self._bottom = corner[1] + TOP, corner[1] + PANEL_HEIGHT - BOTTOM
        self._highest = 1.0

    def draw(self, title: str, lines: Sequence[Series]) -> None:
        highest = max((value for line in lines for value in line.values if value is not None), default=1.0)
        step = _tick(highest)
        num_ticks = max(math.ceil(highest / step), 1)
        self._highest = num_ticks * step
        self._pen.text((self._left, self._top - 28), title, fill=BLACK, font=_font(16))
        for number in range(num_ticks + 1):
            y = self._y(number * step)
            self._pen.line([(self._left, y), (self._right, y)], fill=GRID)
            self._pen.text((self._left - 8, y), f"{number * step:g}", fill=BLACK, font=_font(13), anchor="rm")
        for number, mark in enumerate(self._marks):
            self._pen.text((self._x(number), self._bottom + 8), mark, fill=BLACK, font=_font(13), anchor="ma")
        for line in lines:
            self._line(line)
        for number, side in enumerate(dict.fromkeys(line.side for line in lines)):
            place = (self._right, self._top - 28 + 16 * number - 8)
            self._pen.text(place, side, fill=COLOURS[side], font=_font(13), anchor="ra")

    def mark(self, under: Sequence[bool]) -> None:
        """Levels where the speculative side is under the plain one."""
        for number, is_under in enumerate(under):
            if is_under:
                place = (self._x(number), self._bottom - 6)
                self._pen.text(place, "UNDER", fill=BAD, font=_font(13), anchor="ms")

    def _x(self, number: int) -> float:
        return self._left + (number + 0.5) * (self._right - self._left) / len(self._marks)

    def _y(self, value: float) -> float:
        return self._bottom - value / self._highest * (self._bottom - self._top)

    def _line(self, line: Series) -> None:
        colour = COLOURS[line.side]
        points = [None if value is None else (self._x(n), self._y(value)) for n, value in enumerate(line.values)]
        for before, after in pairwise(points):
            if before is not None and after is not None:
                for segment in _dashes(before, after) if line.dashed else [(before, after)]:
                    self._pen.line(segment, fill=colour, width=2)
        for point in points:
            if point is not None:
                x, y = point
                self._pen.ellipse([x - 3, y - 3, x + 3, y + 3], fill=WHITE if line.dashed else colour, outline=colour)


def _dashes(begin: Point, end: Point) -> list[tuple[Point, Point]]:
    count = max(int(math.dist(begin, end) / DASH), 1)

    def at(share: float) -> Point:
        return begin[0] + share * (end[0] - begin[0]), begin[1] + share * (end[1] - begin[1])

    return [(at(number / count), at((number + 1) / count)) for number in range(0, count, 2)]


def _tick(highest: float) -> float:
    """A round distance between lines of the grid, for four to ten of them."""
    power = 10 ** math.floor(math.log10(highest)) if highest > 0 else 1.0
    return next(power * factor for factor in (0.1, 0.2, 0.5, 1.0) if highest / (power * factor) <= 10)


def _font(size: int) -> FreeTypeFont | ImageFont:
    from PIL import ImageFont

    return ImageFont.load_default(size)
