"""The charts' writer."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from benchmarks.svg import Axis, Series, chart

X, Y = Axis("array", "{:g} B".format, base=4), Axis("time", "{:g} µs".format)
NAMESPACE = "{http://www.w3.org/2000/svg}"


def parsed(*lines: Series) -> ElementTree.Element:
    return ElementTree.fromstring(chart("a < b", X, Y, lines))


def test_it_is_xml_with_its_title_axes_and_lines() -> None:
    root = parsed(Series("one", "#123456", [(4, 10), (4096, 1000)]), Series("two", "#654321", [(4, 20)], "2 2"))
    texts = [text.text for text in root.iter(f"{NAMESPACE}text")]
    assert {"a < b", "array", "time", "one", "two", "4 B", "10 µs", "1000 µs"} <= set(texts)
    assert len(list(root.iter(f"{NAMESPACE}polyline"))) == 2
    assert len(list(root.iter(f"{NAMESPACE}circle"))) == 3
    assert "prefers-color-scheme: dark" in root.find(f"{NAMESPACE}style").text


def test_equal_ratios_are_equal_distances() -> None:
    root = parsed(Series("one", "red", [(4, 1), (64, 10), (1024, 100)]))
    points = [[float(n) for n in p.split(",")] for p in root.find(f"{NAMESPACE}polyline").get("points").split()]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert y0 > y2  # slower is higher up, where SVG's y is smaller


def test_names_at_the_same_place_are_moved_apart() -> None:
    text = chart("t", X, Y, [Series(name, "red", [(4, 10)]) for name in ("one", "two", "three")])
    heights = [float(y) for y, name in re.findall(r'<text x="[\d.]+" y="([\d.]+)"[^>]*>(one|two|three)<', text)]
    assert len(heights) == 3
    assert min(b - a for a, b in zip(sorted(heights), sorted(heights)[1:], strict=False)) >= 14


def test_a_chart_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="'a < b' has no points"):
        parsed(Series("one", "red", []))
