"""A small table for the terminal, for people who change something and want to see what it did."""

from __future__ import annotations

from benchmarks.plan import Cell
from benchmarks.results import Results
from benchmarks.tables import microseconds, ratio, size, spread, table


def compact(results: Results) -> str:
    """Return median microseconds of every peer with their spread, and the ratios to the first peer."""
    peers = list(dict.fromkeys(cell.peer for cell in results.turns))
    rows = []
    for case in results.cases():
        cells = [Cell(case, peer) for peer in peers]
        summaries = [results.summary(cell) if cell in results.turns else None for cell in cells]
        times = ["" if one is None else f"{microseconds(one.median)} {spread(one)}" for one in summaries]
        ratios = [results.ratio(cell, cells[0]) for cell in cells[1:]]
        figures = [*times, *("" if value is None else ratio(value) for value in ratios)]
        rows.append([case.operation, str(case.ranks), size(case.nbytes) if case.nbytes else "", *figures])
    headings = ["median µs", "ranks", "array", *peers, *(f"{peer}/{peers[0]}" for peer in peers[1:])]
    return table(headings, rows, texts=1)
