"""What RankMesh is to reach: ratios of medians measured in one run, and a few limits, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks import ddp
from benchmarks.plan import COLLECTIVES, HALVES, KIB, MIB, SIZES, Case, Cell, cases
from benchmarks.results import Results
from benchmarks.tables import ratio

BATCH = 64 * KIB
SHM, TCP, GLOO, MPI = "rankmesh-shm", "rankmesh-tcp", "gloo", "mpi"
ATTACHED = "rankmesh-attached"
STORE, TORCH_STORE = "rankmesh-store", "torch-store"


class Comparison(NamedTuple):
    """Two cells whose ratio is wanted: how many times as long theirs takes."""

    theirs: Cell
    ours: Cell


@dataclass(frozen=True)
class Target:
    """A ratio that is wanted of one or more comparisons.

    Attributes:
        row: the line of the table; what it is missed by is explained under this name.
        against: whom, in words.
        wanted: in words.
        least: what every ratio is to be at least; 0.25 is 'within 4x'.
        comparisons: the ratios.
    """

    row: str
    against: str
    wanted: str
    least: float
    comparisons: Sequence[Comparison]

    def measured(self, results: Results) -> dict[Comparison, float]:
        """Return the ratios there are."""
        ratios = {one: results.ratio(one.theirs, one.ours) for one in self.comparisons}
        return {one: value for one, value in ratios.items() if value is not None}


@dataclass(frozen=True)
class Limit:
    """A value that is to stay below a limit.

    Attributes:
        row: the line of the table.
        wanted: in words.
        most: of the median, in the cell's unit.
        cell: what is measured.
        beyond: what is taken off, if it is the difference of two medians that counts.
    """

    row: str
    wanted: str
    most: float
    cell: Cell
    beyond: Cell | None = None


def against_gloo(row: str, ours: str, least: float, chosen: Iterable[Case]) -> Target:
    """Want at least so many times gloo's speed."""
    return Target(row, "gloo", f"≥ {least:g}x", least, [Comparison(Cell(c, GLOO), Cell(c, ours)) for c in chosen])


def against_mpi(row: str, chosen: Iterable[Case], least: float = 1.0) -> Target:
    """Want Open MPI's speed times something."""
    wanted = f"within {1 / least:g}x" if least < 1 else "faster" if least == 1 else f"≥ {least:g}x"
    return Target(row, "Open MPI", wanted, least, [Comparison(Cell(c, MPI), Cell(c, SHM)) for c in chosen])


def _cases(operations: Sequence[str], ranks: Sequence[int], wanted: Callable[[int], bool]) -> list[Case]:
    return cases(operations, ranks, [nbytes for nbytes in SIZES if wanted(nbytes)])


def _all_reduce(ranks: Sequence[int], least: int, most: int) -> list[Case]:
    return _cases(["all_reduce"], ranks, lambda nbytes: least <= nbytes <= most)


def _collectives() -> list[Target]:
    row = "shared memory: broadcast, all_gather, reduce_scatter, all_to_all, reduce, gather, scatter, send/recv"
    return [
        against_gloo(f"{row}, to 1 MiB", SHM, 3, _cases(COLLECTIVES, (2, 4), lambda nbytes: nbytes <= MIB)),
        against_gloo(f"{row}, above 1 MiB", SHM, 2, _cases(COLLECTIVES, (2, 4), lambda nbytes: nbytes > MIB)),
        against_mpi(f"{row}, from 1 MiB", _cases(COLLECTIVES, (2, 4), lambda nbytes: nbytes >= MIB)),
    ]


def _store(row: str, theirs: str, ours: str, least: float) -> Target:
    comparison = Comparison(Cell(Case(theirs, 1, 0), TORCH_STORE), Cell(Case(ours, 1, 0), STORE))
    wanted = f"≥ {least:g}x" if least > 1 else "as fast"
    return Target(row, f"torch's {theirs.removeprefix('store_')}", wanted, least, [comparison])


def _ddp(row: str, part: str, least: float) -> Target:
    chosen = [ddp.case(model, part, ranks) for model in ddp.MODELS for ranks in ddp.RANKS]
    wanted = f"≥ {least:g}x" if least > 1 else "never slower"
    return Target(row, "gloo", wanted, least, [Comparison(Cell(c, ddp.GLOO), Cell(c, ddp.OURS)) for c in chosen])


_SMALL_2 = "shared memory, 2 ranks, all_reduce to 4 KiB"
_MIDDLE_2 = "shared memory, 2 ranks, all_reduce 64 KiB, 1 MiB"
_LARGE_2 = "shared memory, 2 ranks, all_reduce 16, 64 MiB"
_SMALL_4 = "shared memory, 4 ranks, all_reduce to 4 KiB"
_LARGE_4 = "shared memory, 4 ranks, all_reduce 64 KiB to 64 MiB"
_BARRIER = "barrier, 2 and 4 ranks"

TARGETS = (
    against_gloo(_SMALL_2, SHM, 40, _all_reduce((2,), 0, 4 * KIB)),
    against_mpi(_SMALL_2, _all_reduce((2,), 0, 4 * KIB), 1 / 4),
    against_gloo(_MIDDLE_2, SHM, 15, _all_reduce((2,), 64 * KIB, MIB)),
    against_mpi(_MIDDLE_2, _all_reduce((2,), 64 * KIB, MIB)),
    against_gloo(_LARGE_2, SHM, 4, _all_reduce((2,), 16 * MIB, 64 * MIB)),
    against_mpi(_LARGE_2, _all_reduce((2,), 16 * MIB, 64 * MIB), 1.5),
    against_gloo(_SMALL_4, SHM, 20, _all_reduce((4,), 0, 4 * KIB)),
    against_mpi(_SMALL_4, _all_reduce((4,), 0, 4 * KIB), 1 / 4),
    against_gloo(_LARGE_4, SHM, 3, _all_reduce((4,), 64 * KIB, 64 * MIB)),
    against_mpi(_LARGE_4, _all_reduce((4,), 64 * KIB, 64 * MIB)),
    *_collectives(),
    against_gloo("TCP, 2 and 4 ranks, all_reduce to 64 KiB", TCP, 4, _all_reduce((2, 4), 0, 64 * KIB)),
    against_gloo("TCP, 2 and 4 ranks, all_reduce 1 MiB", TCP, 2, _all_reduce((2, 4), MIB, MIB)),
    against_gloo("TCP, 2 and 4 ranks, all_reduce 64 MiB", TCP, 1.2, _all_reduce((2, 4), 64 * MIB, 64 * MIB)),
    against_gloo(
        "float16 and bfloat16 all_reduce 64 MiB", SHM, 2, _cases(HALVES, (2, 4), lambda nbytes: nbytes == 64 * MIB)
    ),
    against_gloo(_BARRIER, SHM, 30, _cases(["barrier"], (2, 4), lambda nbytes: True)),
    against_mpi(_BARRIER, _cases(["barrier"], (2, 4), lambda nbytes: True), 1 / 10),
    against_gloo(
        "64 async all_reduce of 64 KiB in flight, then wait",
        SHM,
        5,
        _cases(["all_reduce_in_flight"], (2, 4), lambda nbytes: nbytes == BATCH),
    ),
    Target(
        "attached, 2 ranks, all_reduce 64 MiB",
        "embedded",
        "≥ 0.6x",
        0.6,
        [Comparison(Cell(c, SHM), Cell(c, ATTACHED)) for c in _all_reduce((2,), 64 * MIB, 64 * MIB)],
    ),
    _ddp("DDP, 2 and 4 ranks: a step", "step", 1),
    _ddp("DDP, 2 and 4 ranks: the communication part of a step", "communication", 3),
    _store("store: get", "store_get", "store_get", 1),
    _store("store: add", "store_add", "store_add", 1),
    _store("store: acknowledged set", "store_add", "store_set", 1),
    _store("store: multi_get of 100 keys", "store_multi_get", "store_multi_get", 5),
    Target(
        "store: 32 clients at once",
        "fastest and slowest client",
        "within 2x",
        1 / 2,
        [
            Comparison(
                Cell(Case("store_crowd_fastest", 32, 0), STORE),
                Cell(Case("store_crowd_slowest", 32, 0), STORE),
            )
        ],
    ),
    Target(
        "join grows about linearly to 64 ranks",
        "half as many ranks",
        "within 2.5x",
        1 / 2.5,
        [
            Comparison(Cell(Case("join_threads", 32, 0), "rankmesh"), Cell(Case("join_threads", 64, 0), "rankmesh")),
            Comparison(Cell(Case("join_launcher", 8, 0), "rankmesh"), Cell(Case("join_launcher", 16, 0), "rankmesh")),
        ],
    ),
)

_FOUR_BYTES = Case("all_reduce", 2, 4)

LIMITS = (
    Limit(
        "attached, 2 ranks, all_reduce 4 B, beyond embedded",
        "< 60 µs",
        60.0,
        Cell(_FOUR_BYTES, ATTACHED),
        Cell(_FOUR_BYTES, SHM),
    ),
    Limit("join of 4 ranks, process start to ready", "< 1.5 s", 1.5e6, Cell(Case("join_launcher", 4, 0), "rankmesh")),
    Limit("idle rank, processor", "< 1 %", 1.0, Cell(Case("idle_percent", 4, 0), "rankmesh")),
    Limit("idle rank, memory above Python and NumPy", "< 60 MB", 60.0, Cell(Case("rss_mb", 4, 0), "rankmesh")),
)


@dataclass(frozen=True)
class Verdict:
    """A target in one run.

    Attributes:
        met: whether all of it was reached; None when nothing of it was measured.
        worst: the figure that decides, in words.
        value: and as a number.
        where: of which cell it is.
    """

    met: bool | None
    worst: str = "not measured"
    value: float | None = None
    where: Cell | None = None


def judge(target: Target | Limit, results: Results) -> Verdict:
    """Say whether a run reached a target."""
    if isinstance(target, Limit):
        cells = [target.cell, *([target.beyond] if target.beyond is not None else [])]
        if any(cell not in results.turns for cell in cells):
            return Verdict(None)
        value = results.summary(target.cell).median
        unit, scale = ("s", 1e6) if target.cell.case.operation.startswith("join") else ("", 1)
        if target.beyond is not None:
            value -= results.summary(target.beyond).median
            unit = "µs"
        return Verdict(value < target.most, f"{value / scale:.2f} {unit}".strip(), value, target.cell)
    measured = target.measured(results)
    if not measured:
        return Verdict(None)
    worst = min(measured, key=lambda one: measured[one])
    value = measured[worst]
    return Verdict(value >= target.least, ratio(value, target.least), value, worst.ours)
