"""Markdown tables that are also readable as plain text, and the figures in them."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.summary import Summary

UNITS = ("B", "KiB", "MiB", "GiB")


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, texts: int = 0) -> str:
    """Return a Markdown table whose columns line up.

    Args:
        headings: of the columns.
        rows: the cells, as many in each row as there are headings.
        texts: how many columns from the left are text, aligned left; the rest are figures, aligned right.
    """
    widths = [max(3, *(len(row[column]) for row in [headings, *rows])) for column in range(len(headings))]
    rule = ["-" * width if column < texts else "-" * (width - 1) + ":" for column, width in enumerate(widths)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if column < texts else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    return "\n".join(line(cells) for cells in [headings, rule, *rows])


def size(nbytes: int) -> str:
    """Return a number of bytes in the largest unit of which it is a whole number."""
    unit = 0
    while unit + 1 < len(UNITS) and nbytes and nbytes % 1024 == 0:
        nbytes //= 1024
        unit += 1
    return f"{nbytes} {UNITS[unit]}"


def microseconds(value: float) -> str:
    """Return a time with two digits or more: 0.95, 3.9, 21, 9 791."""
    digits = 2 if value < 1 else 1 if value < 10 else 0
    return f"{value:,.{digits}f}".replace(",", " ")


def ratio(value: float, wanted: float = 1.0) -> str:
    """Return how many times, with two digits or more: 0.011x, 0.52x, 3.1x, 120x.

    It is not rounded up to what is wanted: 3.97 is 3.97x, not 4.0x, for who wants 4, and 0.998 is slower than 1.
    """
    digits = 3 if value < 0.1 else 2 if value < 1 else 1 if value < 10 else 0
    while digits < 6 and value < wanted <= round(value, digits):
        digits += 1
    return f"{value:.{digits}f}x"


def spread(summary: Summary) -> str:
    """Return half the distance of the quartiles, in per cent of the median."""
    return f"±{50 * (summary.upper - summary.lower) / summary.median:.0f}%"
