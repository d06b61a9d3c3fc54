"""A small table for the terminal, for people who change something and want to see what it did."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.peers import Peer
from benchmarks.plan import Cell
from benchmarks.run import Results
from benchmarks.tables import microseconds, ratio, size, table


def compact(results: Results, peers: Sequence[Peer]) -> str:
    """Return median microseconds of every peer with the middle half, and the ratios to the first peer."""
    first, *others = peers
    headings = [
        "",
        "ranks",
        "array",
        *(peer.name for peer in peers),
        *(f"{other.name}/{first.name}" for other in others),
    ]
    rows = []
    for case in results.cases():
        times, ratios = [], []
        for peer in peers:
            cell = Cell(case, peer.name)
            if cell in results.turns:
                summary = results.summary(cell)
                spread = f"{microseconds(summary.lower)}-{microseconds(summary.upper)}"
                times.append(f"{microseconds(summary.median)} ({spread})")
            else:
                times.append("")
        for other in others:
            value = results.ratio(case, other.name, first.name)
            ratios.append("" if value is None else ratio(value))
        rows.append([case.operation, str(case.ranks), size(case.nbytes) if case.nbytes else "", *times, *ratios])
    return table(headings, rows, texts=1)
