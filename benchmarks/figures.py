"""Figures as text: ratios, sizes, cases, and tables of them."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.cases import Case, Cell
from benchmarks.results import Results, Run


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, texts: int = 0) -> str:
    """Return a Markdown table with aligned columns, of which the first ``texts`` are text and the others figures."""
    widths = [max(3, *(len(row[column]) for row in [headings, *rows])) for column in range(len(headings))]
    rule = ["-" * width if column < texts else "-" * (width - 1) + ":" for column, width in enumerate(widths)]

    def line(cells: Sequence[str]) -> str:
        pairs = enumerate(zip(cells, widths, strict=True))
        return f"| {' | '.join(c.ljust(width) if n < texts else c.rjust(width) for n, (c, width) in pairs)} |"

    return "\n".join(line(cells) for cells in [headings, rule, *rows])


def size(nbytes: float) -> str:
    """Return a number of bytes in the largest unit of which it is a whole number."""
    for unit in ("B", "KiB", "MiB"):
        if not nbytes or nbytes % 1024:
            return f"{nbytes:.0f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.0f} GiB"


def ratio(value: float, wanted: float = 1.0) -> str:
    """Return a ratio with two digits or more, never rounded up to what is wanted: 0.011x, 0.52x, 3.97x, 120x."""
    digits = 3 if value < 0.1 else 2 if value < 1 else 1 if value < 10 else 0
    while digits < 6 and value < wanted <= round(value, digits):
        digits += 1
    return f"{value:.{digits}f}x"


def case_name(case: Case) -> str:
    """Return a case as text."""
    busy = f" beside {case.busy} busy processes" if case.busy else ""
    return f"{case.operation}, {case.ranks} ranks{f', {size(case.nbytes)}' if case.nbytes else ''}{busy}"


def timings(results: Results, title: str = "median µs") -> str:
    """Return the table of median microseconds for the terminal, with ratios to the first implementation."""
    names = list(dict.fromkeys(cell.name for cell in results.turns))
    rows = []
    for case in results.cases():
        cells = [Cell(case, name) for name in names]
        times = [f"{results.median(cell):.4g}" if cell in results.turns else "" for cell in cells]
        ratios = [results.ratio(cell, cells[0]) for cell in cells[1:]]
        rows.append([case_name(case), *times, *("" if value is None else ratio(value) for value in ratios)])
    return table([title, *names, *(f"{name}/{names[0]}" for name in names[1:])], rows, texts=1)


def measured_on(run: Run) -> str:
    """Return the sentences that name the machine, the versions and the day of a run."""
    machine = "; ".join(f"{name}: {what}" for name, what in run.machine.items())
    versions = ", ".join(dict.fromkeys(run.results.versions.values()))
    return f"Measured on {run.began:%Y-%m-%d} on {machine}. Versions: {versions}."
