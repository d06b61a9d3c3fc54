"""Text tables: aligned lines in files and pipes, with colour on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rankmesh_agent.wire.printable import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

_GAP = "  "
_COLOURS = {
    "alive": "green",
    "free": "green",
    "leased": "cyan",
    "ok": "green",
    "joining": "cyan",
    "suspect": "yellow",
    "warning": "yellow",
    "failed": "bold red",
    "problem": "bold red",
    "left": "dim",
}
"""Colours of cells with these words."""


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


def lines(tables: Iterable[Table]) -> str:
    """Return tables as text without trailing spaces."""
    parts = []
    for table in tables:
        if not table.visible:
            continue
        text = [printable(table.title)]
        if table.rows:
            headings = [heading.lstrip(">") for heading in table.columns]
            cells = [headings] if any(headings) else []
            cells += [[printable(cell) for cell in row] for row in table.rows]
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            rights = [heading.startswith(">") for heading in table.columns]
            for row in cells:
                fitted = (
                    cell.rjust(width) if right else cell.ljust(width)
                    for cell, width, right in zip(row, widths, rights, strict=True)
                )
                text.append((_GAP + _GAP.join(fitted)).rstrip())
        else:
            text.append(_GAP + printable(table.empty, lines=True))
        parts.append("\n".join(text) + "\n")
    return "\n".join(parts)


def renderable(tables: Iterable[Table]) -> RenderableType:
    """Return tables as renderables of rich."""
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    found: list[RenderableType] = []
    for table in tables:
        if not table.visible:
            continue
        if not table.rows:
            found.append(Text(f"{printable(table.title)}\n{_GAP}{printable(table.empty, lines=True)}\n"))
            continue
        # No lines, so that more rows fit on the screen.
        made = RichTable(
            title=Text(printable(table.title), "bold"), title_justify="left", box=None, padding=(0, 2, 0, 0)
        )
        made.show_header = any(table.columns)
        for heading in table.columns:
            made.add_column(heading.lstrip(">"), justify="right" if heading.startswith(">") else "left")
        for row in table.rows:
            made.add_row(*(Text(printable(cell), _COLOURS.get(cell, "")) for cell in row))
        found += [made, Text("")]
    return Group(*found)


def show(tables: Sequence[Table]) -> None:
    """Write tables to standard output: through rich on a terminal, else as text."""
    import sys

    from rankmesh._cli.exit_codes import write

    if not sys.stdout.isatty():
        write(lines(tables))
        return
    from rich.console import Console

    Console().print(renderable(tables))
