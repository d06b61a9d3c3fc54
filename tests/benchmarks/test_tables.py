"""Tables and the figures in them."""

from __future__ import annotations

import pytest

from benchmarks.summary import Summary
from benchmarks.tables import microseconds, ratio, size, spread, table


def test_columns_line_up() -> None:
    text = table(["name", "time"], [["a", "12345"], ["longer", "1"]], texts=1)
    assert text.splitlines() == [
        "| name   |  time |",
        "| ------ | ----: |",
        "| a      | 12345 |",
        "| longer |     1 |",
    ]


def test_narrow_columns_have_room_for_their_rule() -> None:
    assert table(["", "x"], [["a", "1"]], texts=1).splitlines()[1] == "| --- | --: |"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (4, "4 B"), (1500, "1500 B"), (65536, "64 KiB"), (1 << 20, "1 MiB"), (64 << 20, "64 MiB")],
)
def test_size(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.951, "0.95"), (3.94, "3.9"), (21.4, "21"), (999.6, "1 000"), (101520.2, "101 520")]
)
def test_microseconds(value: float, text: str) -> None:
    assert microseconds(value) == text


@pytest.mark.parametrize(("value", "text"), [(0.0114, "0.011x"), (0.517, "0.52x"), (3.14, "3.1x"), (119.7, "120x")])
def test_ratio(value: float, text: str) -> None:
    assert ratio(value) == text


@pytest.mark.parametrize(
    ("value", "wanted", "text"),
    [(3.97, 4, "3.97x"), (3.9999, 4, "3.9999x"), (4.02, 4, "4.0x"), (0.998, 1, "0.998x"), (0.249, 0.25, "0.249x")],
)
def test_a_ratio_is_not_rounded_up_to_what_is_wanted(value: float, wanted: float, text: str) -> None:
    assert ratio(value, wanted) == text


def test_spread_is_half_the_middle_half() -> None:
    assert spread(Summary(median=100, least=1, lower=90, upper=120)) == "±15%"
