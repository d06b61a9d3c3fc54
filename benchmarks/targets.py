"""What RankMesh is to reach: ratios within one run, and a few limits, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from benchmarks import ddp
from benchmarks.cases import BUSY_CASES, COLLECTIVES, HALF_TYPES, KIB, MIB, RANKS, SIZES, Case, Cell, cases, full
from benchmarks.results import Results

MEASURED = frozenset(full())
ALL = ("all_reduce", *COLLECTIVES)
SHM, TCP, GLOO, MPI, ATTACHED = "rankmesh-shm", "rankmesh-tcp", "gloo", "mpi", "rankmesh-attached"


class Target(NamedTuple):
    """Every ratio, theirs to ours, is to be at least ``least``; 0.25 is "within 4x"."""

    row: str
    against: str
    least: float
    comparisons: Sequence[tuple[Cell, Cell]]

    @property
    def wanted(self) -> str:
        return f"within {1 / self.least:g}x" if self.least < 1 else f"≥ {self.least:g}x"


class Limit(NamedTuple):
    """The median of a cell, less that of ``baseline``, is to stay below ``most`` times ``scale``, in a unit."""

    row: str
    most: float
    unit: str
    cell: Cell
    scale: float = 1.0
    baseline: Cell | None = None
    against: str = ""

    @property
    def wanted(self) -> str:
        return f"< {self.most:g} {self.unit}"


class Verdict(NamedTuple):
    """Whether a run reached a target (None: nothing of it was measured), the worst figure, and its cell."""

    met: bool | None
    worst: float | None = None
    cell: Cell | None = None


def _target(row: str, theirs: str, ours: str, least: float, chosen: Iterable[Case]) -> Target:
    against = {GLOO: "gloo", MPI: "Open MPI", SHM: "embedded"}[theirs]
    return Target(row, against, least, [(Cell(case, theirs), Cell(case, ours)) for case in chosen])


def _cases(operations: Sequence[str], ranks: Sequence[int], wanted: Callable[[int], bool]) -> list[Case]:
    found = cases(operations, ranks, [nbytes for nbytes in SIZES if wanted(nbytes)])
    return [case for case in found if case in MEASURED]


def _store(row: str, theirs: str, ours: str, least: float = 1.0) -> Target:
    pair = Cell(Case(theirs, 2), GLOO), Cell(Case(ours, 2), SHM)
    return Target(f"store: {row}", f"torch's {theirs.removeprefix('store_')}", least, [pair])


def _ddp(row: str, part: str, least: float) -> Target:
    pairs = [(Cell(case, ddp.GLOO), Cell(case, ddp.OURS)) for case in ddp.cases(part)]
    return Target(f"DDP: {row}", "gloo", least, pairs)


def _join(ranks: int) -> Cell:
    return Cell(Case("join", ranks), "rankmesh")


_4_BYTES = Case("all_reduce", 2, 4)

TARGETS: tuple[Target | Limit, ...] = (
    _target("shm, all collectives to 4 KiB", GLOO, SHM, 4, _cases(ALL, RANKS, lambda n: n <= 4 * KIB)),
    _target("shm, all collectives from 64 KiB", GLOO, SHM, 1, _cases(ALL, RANKS, lambda n: n >= 64 * KIB)),
    _target("shm, all collectives from 64 KiB", MPI, SHM, 1, _cases(ALL, RANKS, lambda n: n >= 64 * KIB)),
    _target("shm, all_reduce from 64 KiB", MPI, SHM, 1.2, _cases(["all_reduce"], RANKS, lambda n: n >= 64 * KIB)),
    _target("shm, all_reduce beside 0, 4, 8 busy processes", GLOO, SHM, 1, BUSY_CASES),
    _target("TCP, all collectives to 4 KiB", GLOO, TCP, 4, _cases(ALL, RANKS, lambda n: n <= 4 * KIB)),
    _target("TCP, all collectives from 64 KiB", GLOO, TCP, 1, _cases(ALL, RANKS, lambda n: n >= 64 * KIB)),
    _target("TCP, all_reduce beside 0, 4, 8 busy processes", GLOO, TCP, 1, BUSY_CASES),
    _target("float16, bfloat16 all_reduce 64 MiB", GLOO, SHM, 2, cases(HALF_TYPES, (2, 4), [64 * MIB])),
    _target("barrier, 2 and 4 ranks", GLOO, SHM, 30, cases(["barrier"], (2, 4), SIZES)),
    _target("barrier, 2 and 4 ranks", MPI, SHM, 1 / 10, cases(["barrier"], (2, 4), SIZES)),
    _target("64 async all_reduce of 64 KiB", GLOO, SHM, 5, cases(["all_reduce_in_flight"], (2, 4), [64 * KIB])),
    _target("attached, 2 ranks, all_reduce 64 MiB", SHM, ATTACHED, 0.2, cases(["all_reduce"], (2,), [64 * MIB])),
    _ddp("a step", "step", 1),
    _ddp("communication in a step", "communication", 2.5),
    _store("get", "store_get", "store_get"),
    _store("add", "store_add", "store_add"),
    _store("acknowledged set", "store_add", "store_set"),
    _store("multi_get of 100 keys", "store_multi_get", "store_multi_get", 5),
    Target("join grows about linearly", "half as many ranks", 1 / 2.5, [(_join(8), _join(16)), (_join(16), _join(32))]),
    Limit("shm, 2 ranks, all_reduce 4 B", 3.5, "µs", Cell(_4_BYTES, SHM)),
    Limit(
        "attached, 2 ranks, all_reduce 4 B, beyond embedded", 60, "µs", Cell(_4_BYTES, ATTACHED), 1, Cell(_4_BYTES, SHM)
    ),
    Limit("join of 4 ranks, process start to ready", 1.5, "s", _join(4), 1e6),
    Limit("idle rank, processor", 1, "%", Cell(Case("idle_percent", 4), "rankmesh")),
    Limit("idle rank, memory above Python and NumPy", 60, "MB", Cell(Case("rss_mb", 4), "rankmesh")),
)


def judge(target: Target | Limit, results: Results) -> Verdict:
    """Return whether a run reached a target."""
    if isinstance(target, Target):
        ratios = {ours: results.ratio(theirs, ours) for theirs, ours in target.comparisons}
        measured = {cell: value for cell, value in ratios.items() if value is not None}
        if not measured:
            return Verdict(None)
        worst = min(measured, key=lambda cell: measured[cell])
        return Verdict(measured[worst] >= target.least, measured[worst], worst)
    if any(cell is not None and cell not in results.turns for cell in (target.cell, target.baseline)):
        return Verdict(None)
    value = results.median(target.cell)
    if target.baseline is not None:
        value -= results.median(target.baseline)
    return Verdict(value / target.scale < target.most, value / target.scale, target.cell)
