"""Text tables: aligned lines in files and pipes, with colour on a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rankmesh._cli.exit_codes import write
from rankmesh_agent.config.env import forbids_colour
from rankmesh_agent.wire.printable import printable, printable_lines

_GAP = "  "
_TITLE = "1"
_COLOURS = {
    "alive": "32",
    "free": "32",
    "leased": "36",
    "ok": "32",
    "joining": "36",
    "suspect": "33",
    "warning": "33",
    "failed": "1;31",
    "problem": "1;31",
    "left": "2",
}
"""Colours of cells with these words, as parameters of ANSI's escape sequence."""


class Table(NamedTuple):
    """A table.

    Attributes:
        title: heading of the table.
        columns: headings; a heading that begins with ``>`` aligns its column to the right.
        rows: formatted cells.
        empty: text without rows; if it is empty too, the table is left out.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    empty: str = ""

    @property
    def visible(self) -> bool:
        """True if there are rows or a text."""
        return bool(self.rows or self.empty)

    def without_empty_column(self, place: int = -1) -> Table:
        """Return the table without a column, by default the last, if that is empty in all rows."""
        if not self.rows or any(row[place] for row in self.rows):
            return self
        place %= len(self.columns)
        columns, *rows = ([*row[:place], *row[place + 1 :]] for row in (self.columns, *self.rows))
        return self._replace(columns=columns, rows=rows)


def lines(tables: Iterable[Table], *, coloured: bool = False) -> str:
    """Return tables as text without trailing spaces."""
    parts = []
    for table in tables:
        if not table.visible:
            continue
        text = [_coloured(printable(table.title), _TITLE * coloured)]
        if table.rows:
            headings = [heading.lstrip(">") for heading in table.columns]
            cells = [headings] if any(headings) else []
            cells += [[printable(cell) for cell in row] for row in table.rows]
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            rights = [heading.startswith(">") for heading in table.columns]
            for row in cells:
                fitted = [
                    cell.rjust(width) if right else cell.ljust(width)
                    for cell, width, right in zip(row, widths, rights, strict=True)
                ]
                fitted[-1] = fitted[-1].rstrip()
                colours = [_COLOURS.get(cell, "") * coloured for cell in row]
                text.append((_GAP + _GAP.join(map(_coloured, fitted, colours))).rstrip())
        else:
            text.append(_GAP + printable_lines(table.empty))
        parts.append("\n".join(text) + "\n")
    return "\n".join(parts)


def _coloured(text: str, colour: str) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m" if colour else text


def show(tables: Sequence[Table]) -> None:
    """Write tables to standard output, coloured on a terminal."""
    write(lines(tables, coloured=sys.stdout.isatty() and not forbids_colour(os.environ)))
