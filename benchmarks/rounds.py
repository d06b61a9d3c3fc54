"""The measurement: implementations take turns, round by round, so that disturbances of the machine meet all of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import groupby
from typing import TypeVar

from benchmarks.busy import BusyProcesses
from benchmarks.cases import Case, Cell, Effort
from benchmarks.implementations import Implementation
from benchmarks.operations import OPERATIONS
from benchmarks.results import Results
from benchmarks.workers import WorkerGroup

T = TypeVar("T")


def progress(line: str) -> None:
    """Print a line of progress to standard error."""
    print(f"[benchmarks] {line}", file=sys.stderr, flush=True)


def measure(
    implementations: Sequence[Implementation],
    cases: Sequence[Case],
    effort: Callable[[Case], Effort],
    results: Results,
) -> None:
    """Measure every cell and add it to the results. Cases of one number of ranks share their rounds."""
    for ranks, same_ranks in groupby(cases, lambda case: case.ranks):
        progress(f"{ranks} ranks: starting {', '.join(one.title for one in implementations)}")
        with ExitStack() as stack:
            groups = [stack.enter_context(WorkerGroup(one, ranks)) for one in implementations]
            results.versions.update({group.implementation.name: group.version for group in groups})
            in_rounds(groups, {case: effort(case) for case in same_ranks}, results)


def in_rounds(groups: Sequence[WorkerGroup], efforts: dict[Case, Effort], results: Results) -> None:
    """Measure cases in common rounds, so that the turns of one case are minutes apart."""
    spent = dict.fromkeys(efforts, 0.0)
    most = max(effort.rounds for effort in efforts.values())
    with BusyProcesses() as busy:
        for number in range(most):
            progress(f"{groups[0].ranks} ranks: round {number + 1} of {most} at most")
            for case, effort in efforts.items():
                if number < effort.least or (number < effort.rounds and spent[case] < effort.budget):
                    began = time.monotonic()
                    busy.run(case.busy)
                    for group in rotated(groups, number):
                        _turn(group, case, effort, results)
                    spent[case] += time.monotonic() - began


def _turn(group: WorkerGroup, case: Case, effort: Effort, results: Results) -> None:
    operation, library = OPERATIONS.get(case.operation), group.implementation.library
    if operation is not None and library in operation.without:
        return
    if case.busy and library == "mpi":  # polls without end: a turn may take minutes
        return
    cell = Cell(case, group.implementation.name)
    calls = results.calls.get(cell)
    if calls is None:
        calls, seconds = _first_turn(group, case, effort)
    else:
        seconds = group.measure(case.operation, case.nbytes, calls, effort.repetitions, effort.processor)
    results.add(cell, [1e6 * second for second in seconds], calls)


def _first_turn(group: WorkerGroup, case: Case, effort: Effort) -> tuple[int, list[float]]:
    """Return the calls in a timing of the wanted length, found again with more calls, and timings of as many."""
    calls = 1
    for _ in range(4):
        seconds = group.measure(case.operation, case.nbytes, calls, effort.repetitions, effort.processor)
        fitting = effort.calls(min(seconds))
        if fitting <= 1.5 * calls:
            break
        calls = fitting
    return calls, seconds


def rotated(items: Sequence[T], number: int) -> list[T]:
    """Return the items in the order of a round: another one is first in each."""
    first = number % len(items)
    return [*items[first:], *items[:first]]
