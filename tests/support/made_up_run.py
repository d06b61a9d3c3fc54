"""A run of figures made up for the tests."""

from __future__ import annotations

from datetime import UTC, datetime

from benchmarks.plan import KIB, MIB, OVERLAP, Case, Cell
from benchmarks.results import Results, Run

MICROSECONDS = {
    ("all_reduce", 4): {"rankmesh-shm": 5, "rankmesh-tcp": 50, "gloo": 300, "mpi": 1},
    ("all_reduce", 64 * KIB): {"rankmesh-shm": 20, "rankmesh-tcp": 80, "gloo": 1200, "mpi": 20},
    ("all_reduce", 16 * MIB): {"rankmesh-shm": 2000, "rankmesh-tcp": 8000, "gloo": 14000, "mpi": 4000},
    ("barrier", 0): {"rankmesh-shm": 4, "gloo": 200, "mpi": 1},
}


def run(factor: float = 1.0) -> Run:
    """Return a run of two ranks in which RankMesh takes a factor longer."""
    results = Results(versions={"rankmesh-shm": "RankMesh 9", "gloo": "gloo 9"})
    for (operation, nbytes), times in MICROSECONDS.items():
        for peer, time in times.items():
            value = time * factor if peer.startswith("rankmesh") else float(time)
            for drift in (1.0, 3.0, 2.0):  # the machine's, the same for all
                results.add(Cell(Case(operation, 2, nbytes), peer), [drift * value, drift * value * 1.1], calls=9)
    for operation, time in zip(OVERLAP, (10_000.0, 20_000.0, 20_000.0, 25_000.0, 20_000.0), strict=True):
        results.add(Cell(Case(operation, 2, 64 * MIB), "gloo"), [time])
    for operation, ours, theirs in [("store_set", 10, 2), ("store_get", 30, 40), ("store_add", 30, 20)]:
        results.add(Cell(Case(operation, 1, 0), "rankmesh-store"), [ours * factor])
        results.add(Cell(Case(operation, 1, 0), "torch-store"), [theirs])
    results.add(Cell(Case("join_launcher", 4, 0), "rankmesh"), [1_200_000.0 * factor])
    results.add(Cell(Case("rss_mb", 4, 0), "rankmesh"), [40.0])
    began = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
    return Run(results, {"processor": "Some CPU, 2 cores"}, began, 24.6, ["A peer is left out: it is not there."])
