"""Draws the plots of docs/results.md from docs/data, with nothing but the standard library:
python scripts/plot_results.py"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"
WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 60, 200, 44, 50  # around the axes; the legend is on the right
COLOURS = ("#1a6fb5", "#c0562b", "#2e8b57", "#85569c", "#a08020", "#666666")


class Plot:
    """An SVG with a title, a vertical axis from 0 and named places on the horizontal one."""

    def __init__(self, title: str, places: Sequence[str], under: str, top: float, ticks: Sequence[float]) -> None:
        self._places, self._top = places, top
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'font-family="Helvetica, Arial, sans-serif" font-size="13" role="img" aria-label="{escape(title)}">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        ]
        self._text(LEFT, 24, title, "start", size=15)
        self._text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, under, "middle", colour="#666666")
        for tick in ticks:
            self._line(LEFT, self._y(tick), WIDTH - RIGHT, self._y(tick), "#dddddd")
            self._text(LEFT - 8, self._y(tick) + 4, f"{tick:g}", "end", colour="#666666")
        for number, place in enumerate(places):
            self._text(self._x(number), HEIGHT - BOTTOM + 18, place, "middle")
        self._num_named = 0

    def bar(self, place: int, value: float, colour: str) -> None:
        """One of several named places, with its value above it."""
        x, y, width = self._x(place), self._y(value), 0.55 * self._step
        height = self._y(0) - y
        self._parts.append(
            f'<rect x="{x - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'
        )
        self._text(x, y - 6, f"{value:.2f}", "middle")

    def line(self, name: str, values: Sequence[float], colour: str) -> None:
        """A value for each place, joined, and a name in the legend."""
        points = [(self._x(number), self._y(value)) for number, value in enumerate(values)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.2"/>')
        self._parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in points]
        y = TOP + 14 + 22 * self._num_named
        self._line(WIDTH - RIGHT + 16, y, WIDTH - RIGHT + 40, y, colour, 2.2)
        self._text(WIDTH - RIGHT + 48, y + 4, name, "start")
        self._num_named += 1

    def level(self, value: float) -> None:
        """A dashed line at a value that matters."""
        self._line(LEFT, self._y(value), WIDTH - RIGHT, self._y(value), "#333333", dashes="5 4")

    def write(self, path: Path) -> None:
        path.write_text("\n".join([*self._parts, "</svg>", ""]))

    @property
    def _step(self) -> float:
        return (WIDTH - LEFT - RIGHT) / len(self._places)

    def _x(self, place: int) -> float:
        return LEFT + (place + 0.5) * self._step

    def _y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self._top * (HEIGHT - TOP - BOTTOM)

    def _line(
        self, x0: float, y0: float, x1: float, y1: float, colour: str, width: float = 1, dashes: str = ""
    ) -> None:
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self._parts.append(
            f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="{colour}" '
            f'stroke-width="{width:g}"{dashed}/>'
        )

    def _text(self, x: float, y: float, text: str, anchor: str, colour: str = "#222222", size: int = 13) -> None:
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size}">'
            f"{escape(text)}</text>"
        )


def read(name: str) -> dict[str, Any]:
    return json.loads((DOCS / "data" / f"{name}.json").read_text())


def draw_speed_up(path: Path) -> None:
    """Speculative over plain tokens a second, by number of clients, for each engine."""
    data = read("race")
    plot = Plot(
        "EAGLE-3 over plain decoding, tokens/s", data["clients"], "requests at a time", 3, (0, 0.5, 1, 1.5, 2, 2.5)
    )
    for colour, (name, sides) in zip(COLOURS, data["engines"].items(), strict=False):
        ratios = [fast / plain for fast, plain in zip(sides["eagle3"], sides["plain"], strict=True)]
        plot.line(name, ratios, colour)
    plot.level(1)
    plot.write(path)


def draw_accept_lengths(path: Path) -> None:
    """Tokens a round, by data set."""
    sets = read("accept_length")["sets"]
    plot = Plot(
        "Accept length by data set", [each["name"] for each in sets], "K = 5, temperature 0", 4, (0, 1, 2, 3, 4)
    )
    for number, each in enumerate(sets):
        plot.bar(number, each["accept_length"], COLOURS[0])
    plot.level(1)
    plot.write(path)


def draw_positions(path: Path) -> None:
    """How many of the drafts stand up to each place, by data set."""
    sets = read("accept_length")["sets"]
    places = [str(1 + number) for number in range(len(sets[0]["acceptance_per_position"]))]
    title, ticks = "Share of drafts that stand, by place in the draft", (0, 0.2, 0.4, 0.6, 0.8, 1)
    plot = Plot(title, places, "place in the draft", 1, ticks)
    for colour, each in zip(COLOURS, sets, strict=False):
        plot.line(each["name"], each["acceptance_per_position"], colour)
    plot.write(path)


def draw_trained(path: Path) -> None:
    """Tokens a round of drafters that were trained here, by data set and temperature."""
    drafters = read("trained")["drafters"]
    columns = [(name, at) for name, found in next(iter(drafters.values()))["accept"].items() for at in found]
    places = [f"{name} {at}" for name, at in columns]
    title, ticks = "SmolLM2-135M-Instruct: accept length, K = 7", (0, 1, 2, 3, 4)
    plot = Plot(title, places, "prompts, temperature", 4, ticks)
    for colour, (name, each) in zip(COLOURS, drafters.items(), strict=False):
        plot.line(name, [each["accept"][file][at]["accept_length"] for file, at in columns], colour)
    plot.level(1)
    plot.write(path)


def draw_training(path: Path) -> None:
    """Tokens a round on held-out prompts while they learnt."""
    drafters = read("trained")["drafters"]
    places = ["0", *(str(each["seconds"]) for each in next(iter(drafters.values()))["curve"])]
    title, ticks = "Served accept length on held-out prompts while they learn", (0, 1, 2, 3)
    plot = Plot(title, places, "seconds of training, four at a time", 3, ticks)
    for colour, (name, each) in zip(COLOURS, drafters.items(), strict=False):
        plot.line(name, [1.0, *(point["accept_length"] for point in each["curve"])], colour)
    plot.write(path)


PLOTS = {
    "speed_up": draw_speed_up,
    "accept_length": draw_accept_lengths,
    "positions": draw_positions,
    "trained": draw_trained,
    "training": draw_training,
}

if __name__ == "__main__":
    for name, draw in PLOTS.items():
        draw(DOCS / "pictures" / f"{name}.svg")
