"""Thresholds from which the next algorithm of a row of ``select`` is faster: ``python -m benchmarks.tune``.

Every row of ``rankmesh_agent.collectives.select`` with more than one algorithm is measured, each algorithm on every
size it can take, through the public call. Prints the limits of the table.
"""

from __future__ import annotations

import argparse
import math
import pprint
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement
from typing import Any, NamedTuple

from benchmarks import worker
from benchmarks.adapters import Adapter
from benchmarks.cases import KIB, Case, Cell, Effort
from benchmarks.implementations import IMPLEMENTATIONS
from benchmarks.operations import OPERATIONS
from benchmarks.results import Results
from benchmarks.rounds import in_rounds, progress
from benchmarks.workers import WorkerGroup
from rankmesh_agent.backends.cpu import CpuBackend
from rankmesh_agent.collectives.select import TABLE, Medium, algorithms
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.wire.ops import OpType

Limits = Mapping[tuple[str, str], Mapping[str, Mapping[int, float]]]
SIZES = tuple(KIB << power for power in range(14))
SLOT = Settings().slot_bytes
"""Bytes of a slot by default: over shared memory all algorithms but a row's last need it."""
MEASURED_BY: dict[Medium, str] = {
    "registered": "rankmesh-registered",
    "link": "rankmesh-tcp",
    "segment": "rankmesh-shm",
    "reads": "rankmesh-shm",
}
"""The implementation that shows each medium on one host; other media keep their thresholds."""
EFFORT = Effort(rounds=5, repetitions=2, seconds=0.005)


class Row(NamedTuple):
    """A row of the table of ``select``."""

    kind: OpType
    medium: Medium

    @property
    def key(self) -> tuple[str, str]:
        return self.kind.name, self.medium

    @property
    def algorithms(self) -> list[tuple[float, str]]:
        """The most bytes that each algorithm can take at all, and its name, in the table's order."""
        return [(most, one.__name__) for most, one in algorithms(self.kind, self.medium, SLOT)]


class Sample(NamedTuple):
    """Seconds of a call by each algorithm, in the row's order, when a rank contributes some bytes."""

    nbytes: int
    seconds: Sequence[float]


def rows() -> list[Row]:
    """Return the rows that have a choice and can be measured on one host."""
    return sorted(
        Row(kind, medium)
        for (kind, medium), choice in TABLE.items()
        if medium in MEASURED_BY and len(choice) > 1 and kind is not OpType.ALL_TO_ALL  # lengths are each rank's own
    )


def switching(algorithms: Sequence[tuple[float, str]], samples: Sequence[Sample]) -> dict[str, int]:
    """Return the thresholds of all algorithms but the last: the largest size at which each is taken, -1 for none.

    They lose least against each sample's best algorithm, in the geometric mean of factors up to two.
    """
    samples = sorted(samples)

    def loss(sample: Sample, number: int) -> float:
        times = sample.seconds[number] / min(sample.seconds)
        return math.inf if math.isinf(times) else math.log(min(times, 2.0))

    def cost(ends: Sequence[int]) -> float:
        bounds = zip([0, *ends], [*ends, len(samples)], strict=True)
        return sum(loss(sample, number) for number, (begin, end) in enumerate(bounds) for sample in samples[begin:end])

    choices = combinations_with_replacement(range(len(samples) + 1), len(algorithms) - 1)
    best, begin, limits = min(choices, key=cost), 0, {}
    for (_, name), end in zip(algorithms, best, strict=False):
        limits[name] = samples[end - 1].nbytes if end > begin else -1
        begin = end
    return limits


def measure(group: WorkerGroup, row: Row, sizes: Iterable[int]) -> list[Sample] | None:
    """Return a row's samples; None where the ranks lack the medium."""
    order = f"{row.kind.name.lower()} {row.medium}"
    contributed: dict[int, int] = {}
    for nbytes in sizes:
        answers = group.ask(f"{order} ?", nbytes, 1, 1)
        if row.medium == "reads" and not all(reads for _, reads in answers):
            return None
        contributed[nbytes] = int(max(counted for counted, _ in answers))
    cells = {
        nbytes: [
            Cell(Case(f"{order} {name}", group.ranks, nbytes), group.implementation.name) for _, name in row.algorithms
        ]
        for nbytes in contributed
    }
    able = [
        cell.case
        for nbytes, count in contributed.items()
        for cell, (most, _) in zip(cells[nbytes], row.algorithms, strict=True)
        if count <= most
    ]
    results = Results()
    in_rounds([group], dict.fromkeys(able, EFFORT), results)
    return [
        Sample(count, [results.median(cell) if cell in results.turns else math.inf for cell in cells[nbytes]])
        for nbytes, count in contributed.items()
    ]


def tune(wanted: Sequence[Row], ranks: Sequence[int], sizes: Sequence[int]) -> Limits:
    """Return the limits of the table, those of the rows and numbers of ranks that are measured replaced."""
    limits: dict[tuple[str, str], dict[str, dict[int, float]]] = {
        (kind.name, medium): {row.algorithm.__name__: dict(row.limits) for row in choice}
        for (kind, medium), choice in TABLE.items()
        if len(choice) > 1
    }
    for name in dict.fromkeys(MEASURED_BY[row.medium] for row in wanted):
        tuned = replace(IMPLEMENTATIONS[name], program="benchmarks.tune", arguments=("--worker",))
        for count in ranks:
            with WorkerGroup(tuned, count) as group:
                for row in [row for row in wanted if MEASURED_BY[row.medium] == name]:
                    samples = measure(group, row, sizes)
                    if samples is None:
                        progress(f"{row.key}: unchanged: the kernel does not let ranks read each other's memory")
                        continue
                    progress(f"{row.key}, {count} ranks: {row.algorithms}: {samples}")
                    for algorithm, limit in switching(row.algorithms, samples).items():
                        limits.setdefault(row.key, {}).setdefault(algorithm, {})[count] = limit
    return limits


class Override:
    """Replaces the algorithm of one kind of call in a rank.

    An order names operation, medium and algorithm, or '?' to ask for the table's bytes and whether memory is readable.
    """

    def __init__(self) -> None:
        self.kind: OpType | None = None
        self.algorithm: Any = None
        self.answer: list[float] = []
        original, override = CpuBackend.run, self

        def run(backend: CpuBackend, algorithm: Any, arguments: Sequence[Any], watch: Any) -> None:
            if watch.call.kind is override.kind:
                reads = backend.segment is not None and backend.segment.can_read
                override.answer = [watch.call.nbytes, reads]
                algorithm = override.algorithm or algorithm
            original(backend, algorithm, arguments, watch)

        CpuBackend.run = run  # type: ignore[method-assign,assignment]

    def carry_out(self, world: Adapter, operation: str, nbytes: int, calls: int, repetitions: int) -> list[float]:
        """Return the timings with the algorithm of the order, or the answer to '?'."""
        name, of, wanted = operation.split()
        (medium,) = [each for each in MEASURED_BY if each == of]
        self.kind, self.algorithm = OpType[name.upper()], None
        if wanted == "?":
            OPERATIONS[name].for_bytes(world, nbytes).call()
            return self.answer
        self.algorithm = {found.__name__: found for _, found in algorithms(self.kind, medium)}[wanted]
        return worker.timings(world, name, nbytes, calls, repetitions)


def main() -> None:
    """Tune as the command line directs."""
    known = {"/".join(row.key): row for row in rows()}
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=known, default=list(known))
    parser.add_argument("--ranks", nargs="+", type=int, default=(2, 4))
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, metavar="BYTES")
    options = parser.parse_args()
    pprint.pprint(tune([known[name] for name in options.only], options.ranks, options.sizes), width=120)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker.main(sys.argv[2], sys.argv[3], carry_out=Override().carry_out)
    else:
        main()
