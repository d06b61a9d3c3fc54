"""Figures and tables for people."""

from __future__ import annotations

import pytest

from rankmesh._cli.tables import Table, lines
from rankmesh_gateway import humanize


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1536, "1.54 kB"), (2.5e6, "2.5 MB"), (1.234e10, "12.3 GB"),
     (5e12, "5 TB")],
)  # fmt: skip
def test_sizes(nbytes: float, text: str):
    assert humanize.size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 µs"), (3.52e-5, "35.2 µs"), (0.0012, "1.2 ms"), (3.44, "3.4 s"), (300, "5 min"), (9000, "2.5 h"),
     (-2, "-2.0 s")],
)  # fmt: skip
def test_times(seconds: float, text: str):
    assert humanize.seconds(seconds) == text


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 3], "0-3"), ([7, 0, 2, 1], "0-2, 7"), ([0, 2], "0, 2")]
)
def test_ranks(numbers: list[int], text: str):
    assert humanize.ranks(numbers) == text


def test_tables():
    some = Table("Some", ["name", ">count"], [["a", "1"], ["long name", "100"]])
    none, nothing = Table("None", ["x"], [], "there is none"), Table("Nothing", ["x"], [])
    assert lines([some, nothing, none]) == (
        "Some\n  name       count\n  a              1\n  long name    100\n\nNone\n  there is none\n"
    )
