"""The charts of the page."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.operations import OPERATIONS
from benchmarks.peers import PEERS
from benchmarks.plan import Cell
from benchmarks.results import Results
from benchmarks.svg import Axis, Series, chart
from benchmarks.tables import size

LINES = {
    "rankmesh-shm": ("#0072b2", ""),
    "rankmesh-registered": ("#56b4e9", "6 3"),
    "rankmesh-tcp": ("#009e73", ""),
    "gloo": ("#d55e00", "2 3"),
    "mpi": ("#cc79a7", "8 3 2 3"),
}
"""How each peer is drawn: colours that people who see few of them can tell apart, and dashes."""
SHARED = ("rankmesh-shm", "rankmesh-registered", "gloo", "mpi")


class Chart(NamedTuple):
    """A chart to draw.

    Attributes:
        name: of the file.
        title: above it.
        operation: whose figures.
        ranks: of how many ranks.
        peers: the lines.
        bandwidth: bus bandwidth instead of latency.
    """

    name: str
    title: str
    operation: str
    ranks: int
    peers: tuple[str, ...]
    bandwidth: bool = False


CHARTS = (
    Chart("all_reduce_shm_2", "all_reduce, shared memory, 2 ranks", "all_reduce", 2, SHARED),
    Chart("all_reduce_shm_4", "all_reduce, shared memory, 4 ranks", "all_reduce", 4, SHARED),
    Chart("all_reduce_tcp_2", "all_reduce, TCP, 2 ranks", "all_reduce", 2, ("rankmesh-tcp", "gloo")),
    Chart("all_reduce_tcp_4", "all_reduce, TCP, 4 ranks", "all_reduce", 4, ("rankmesh-tcp", "gloo")),
    Chart("bus_bandwidth_2", "all_reduce, bus bandwidth, 2 ranks", "all_reduce", 2, tuple(LINES), bandwidth=True),
    Chart(
        "registered_2",
        "all_gather, registered arrays, 2 ranks",
        "all_gather",
        2,
        ("rankmesh-shm", "rankmesh-registered", "mpi"),
    ),
)


def bus_bandwidth(results: Results, cell: Cell) -> float | None:
    """Return GB/s as nccl-tests defines bus bandwidth; None for what has none."""
    factor = OPERATIONS[cell.case.operation].bus if cell.case.operation in OPERATIONS else None
    if factor is None:
        return None
    return factor(cell.case.ranks) * cell.case.nbytes / results.summary(cell).median / 1e3


def drawn(results: Results) -> dict[str, tuple[str, str]]:
    """Return the charts whose figures are there: title and SVG, by file name."""
    files = {}
    for wanted in CHARTS:
        lines = [line for line in (_line(results, wanted, peer) for peer in wanted.peers) if line.points]
        if len(lines) > 1:
            y = Axis("bus bandwidth, GB/s", "{:g}".format) if wanted.bandwidth else Axis("time a call", _time)
            x = Axis("array", lambda value: size(round(value)), base=4)
            files[f"{wanted.name}.svg"] = (wanted.title, chart(wanted.title, x, y, lines))
    return files


def _line(results: Results, wanted: Chart, peer: str) -> Series:
    points = []
    for case in results.cases():
        cell = Cell(case, peer)
        if (case.operation, case.ranks) == (wanted.operation, wanted.ranks) and cell in results.turns:
            value = bus_bandwidth(results, cell) if wanted.bandwidth else results.summary(cell).median
            points.append((float(case.nbytes), value or 0.0))
    colour, dash = LINES[peer]
    return Series(PEERS[peer].short, colour, sorted(points), dash)


def _time(microseconds: float) -> str:
    for unit, scale in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= scale:
            return f"{microseconds / scale:g} {unit}"
    return f"{microseconds:g} µs"
