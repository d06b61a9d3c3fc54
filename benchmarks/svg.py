"""A small writer of line charts as SVG: logarithmic axes, one line a series, readable on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 76, 190, 48, 58
GAP = 15
"""Least vertical distance of the names at the lines' ends."""

STYLE = """
  .card { fill: #ffffff } .grid { stroke: #d0d7de; stroke-width: 1 }
  text { fill: #24292f; font: 13px system-ui, sans-serif } .tick { font-size: 12px }
  .title { font-size: 15px; font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    .card { fill: #161b22 } text { fill: #e6edf3 } .grid { stroke: #30363d }
  }
"""


class Series(NamedTuple):
    """A line.

    Attributes:
        name: written at its end.
        colour: in any way CSS has.
        points: (x, y), both above 0, by x.
        dash: as SVG's stroke-dasharray, so that lines differ without colours too.
    """

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    dash: str = ""


class Axis(NamedTuple):
    """An axis.

    Attributes:
        label: what it shows, with the unit.
        name: says a value on it in words.
        base: a line is drawn at each power of it.
    """

    label: str
    name: Callable[[float], str]
    base: float = 10


def chart(title: str, x: Axis, y: Axis, lines: Sequence[Series]) -> str:
    """Return a chart, both axes logarithmic.

    Raises:
        ValueError: there is no point to draw.
    """
    points = [point for line in lines for point in line.points]
    if not points:
        raise ValueError(f"the chart {title!r} has no points")
    across = _Scale([px for px, _ in points], LEFT, WIDTH - RIGHT, x.base)
    up = _Scale([py for _, py in points], HEIGHT - BOTTOM, TOP, y.base)
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts = [
        f'<rect class="card" width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
        _text(LEFT, 26, title, "start", "title"),
        _text(middle, HEIGHT - 12, x.label, "middle"),
        f'<g transform="rotate(-90 18 {(TOP + HEIGHT - BOTTOM) / 2:g})">'
        + _text(18, (TOP + HEIGHT - BOTTOM) / 2, y.label, "middle")
        + "</g>",
    ]
    for value in across.ticks():
        at = across(value)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(_text(at, HEIGHT - BOTTOM + 18, x.name(value), "middle", "tick"))
    for value in up.ticks():
        at = up(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(_text(LEFT - 8, at + 4, y.name(value), "end", "tick"))
    ends = _apart([(up(line.points[-1][1]), line) for line in lines if line.points])
    for at, line in ends:
        path = " ".join(f"{across(px):.1f},{up(py):.1f}" for px, py in line.points)
        dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="2.5"{dash}/>')
        parts += [
            f'<circle cx="{across(px):.1f}" cy="{up(py):.1f}" r="3.5" fill="{line.colour}"/>' for px, py in line.points
        ]
        end = across(line.points[-1][0])
        parts.append(f'<line x1="{end + 8:.1f}" x2="{end + 22:.1f}" y1="{at:.1f}" y2="{at:.1f}" '
                     f'stroke="{line.colour}" stroke-width="2.5"{dash}/>')  # fmt: skip
        parts.append(_text(end + 27, at + 4, line.name, "start"))
    body = "\n  ".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img">\n  <title>{escape(title)}</title>\n  <style>{STYLE}</style>\n  {body}\n</svg>\n'
    )


class _Scale:
    """From values to pixels, by their logarithms."""

    def __init__(self, values: Sequence[float], begin: float, end: float, base: float) -> None:
        self._base = base
        self._low, self._high = math.log(min(values), base), math.log(max(values), base)
        if base == 10:
            self._low, self._high = math.floor(self._low), math.ceil(self._high)
        if self._high <= self._low:
            self._low, self._high = self._low - 1, self._high + 1
        self._begin, self._end = begin, end

    def __call__(self, value: float) -> float:
        part = (math.log(value, self._base) - self._low) / (self._high - self._low)
        return self._begin + part * (self._end - self._begin)

    def ticks(self) -> list[float]:
        """Return the powers of the base within, at most about eight."""
        first, last = math.ceil(self._low - 1e-9), math.floor(self._high + 1e-9)
        return [self._base**power for power in range(first, last + 1, max(1, (last - first) // 8 + 1))]


def _apart(ends: list[tuple[float, Series]]) -> list[tuple[float, Series]]:
    """Move names apart that would lie on each other."""
    ends = sorted(ends, key=lambda end: end[0])
    moved: list[tuple[float, Series]] = []
    for at, line in ends:
        moved.append((max(at, moved[-1][0] + GAP) if moved else at, line))
    return moved


def _text(x: float, y: float, words: str, anchor: str, kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{attribute}>{escape(words)}</text>'
