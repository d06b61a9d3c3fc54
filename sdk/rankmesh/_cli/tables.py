"""Tables of text: aligned lines where a program or a file reads them, with colour on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rankmesh._cli.humanize import plain

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
"""Colours of cells that hold one of these words; the word says it all without."""


class Table(NamedTuple):
    """A table.

    Attributes:
        title: what it shows.
        columns: their headings; one that begins with ``>`` is aligned to the right.
        rows: their cells, as they are to be shown.
        empty: what to say when there are no rows; the table is left out if this is empty too.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    empty: str = ""

    @property
    def shown(self) -> bool:
        """Whether there is anything to say."""
        return bool(self.rows or self.empty)


def lines(tables: Iterable[Table]) -> str:
    """Return tables as text, each line as long as it has to be."""
    parts = []
    for table in tables:
        if not table.shown:
            continue
        text = [table.title]
        if table.rows:
            headings = [heading.lstrip(">") for heading in table.columns]
            cells = [headings] if any(headings) else []
            cells += [[plain(cell) for cell in row] for row in table.rows]
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            rights = [heading.startswith(">") for heading in table.columns]
            for row in cells:
                fitted = (
                    cell.rjust(width) if right else cell.ljust(width)
                    for cell, width, right in zip(row, widths, rights, strict=True)
                )
                text.append((_GAP + _GAP.join(fitted)).rstrip())
        else:
            text.append(_GAP + table.empty)
        parts.append("\n".join(text) + "\n")
    return "\n".join(parts)


def renderable(tables: Iterable[Table]) -> RenderableType:
    """Return tables as rich shows them on a terminal."""
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    found: list[RenderableType] = []
    for table in tables:
        if not table.shown:
            continue
        if not table.rows:
            found.append(Text(f"{table.title}\n{_GAP}{table.empty}\n"))
            continue
        # No lines: the more fits on a screen, the better a live table is.
        made = RichTable(title=Text(table.title, "bold"), title_justify="left", box=None, padding=(0, 2, 0, 0))
        made.show_header = any(table.columns)
        for heading in table.columns:
            made.add_column(heading.lstrip(">"), justify="right" if heading.startswith(">") else "left")
        for row in table.rows:
            made.add_row(*(Text(plain(cell), _COLOURS.get(cell, "")) for cell in row))
        found += [made, Text("")]
    return Group(*found)


def show(tables: Sequence[Table]) -> None:
    """Write tables to standard output, in the way that suits it."""
    import sys

    from rankmesh._cli.exit_codes import write

    if not sys.stdout.isatty():
        write(lines(tables))
        return
    from rich.console import Console

    Console().print(renderable(tables))
