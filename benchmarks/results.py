"""What came out of a run, and how it is kept as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from statistics import median
from typing import Any

from benchmarks.plan import Case, Cell
from benchmarks.summary import Summary, summarize


@dataclass
class Results:
    """What came out.

    Attributes:
        versions: of each peer, by its name.
        calls: of how many calls each timing is, for each cell.
        turns: microseconds an operation, for each cell, in each round a list of timings.
    """

    versions: dict[str, str] = field(default_factory=dict)
    calls: dict[Cell, int] = field(default_factory=dict)
    turns: dict[Cell, list[list[float]]] = field(default_factory=dict)

    def cases(self) -> list[Case]:
        """Return what was measured, in order."""
        return list(dict.fromkeys(cell.case for cell in self.turns))

    def add(self, cell: Cell, turn: Sequence[float], calls: int = 1) -> None:
        """Add the timings, in microseconds, of a peer's turn."""
        self.calls[cell] = calls
        self.turns.setdefault(cell, []).append(list(turn))

    def summary(self, cell: Cell) -> Summary:
        """Return all of a cell's timings in a few numbers."""
        return summarize([timing for turn in self.turns[cell] for timing in turn])

    def ratio(self, theirs: Cell, ours: Cell) -> float | None:
        """Return how many times as long theirs takes, round by round, in the median; None if not both were measured.

        Within a round two peers' turns are a moment apart. Over minutes a virtual machine's speed changes by more than
        the peers differ, so that a ratio of overall medians may compare one's good minutes with the other's bad ones.
        """
        if theirs not in self.turns or ours not in self.turns:
            return None
        rounds = zip(self.turns[theirs], self.turns[ours], strict=False)  # of two cases, one may have had more time
        return median(median(theirs) / median(ours) for theirs, ours in rounds)


@dataclass
class Run:
    """A run of the benchmark.

    Attributes:
        results: the figures.
        machine: what they were measured on, name and description.
        began: when.
        minutes: how long it took.
        left_out: a line for each peer or part that was not measured.
    """

    results: Results
    machine: dict[str, str]
    began: datetime
    minutes: float = 0.0
    left_out: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return everything, for programs and for ``benchmarks.page``."""
        results = self.results
        return {
            "began": self.began.isoformat(timespec="seconds"),
            "minutes": round(self.minutes, 2),
            "machine": self.machine,
            "versions": results.versions,
            "left_out": self.left_out,
            "cells": [
                {
                    **cell.case._asdict(),
                    "peer": cell.peer,
                    **results.summary(cell)._asdict(),
                    "calls": results.calls[cell],
                    "turns": [[round(timing, 3) for timing in turn] for turn in turns],
                }
                for cell, turns in results.turns.items()
            ],
        }

    @classmethod
    def from_json(cls, read: dict[str, Any]) -> Run:
        """Return the run that ``as_json`` was made of."""
        results = Results(versions=read["versions"])
        for one in read["cells"]:
            cell = Cell(Case(one["operation"], one["ranks"], one["nbytes"]), one["peer"])
            results.turns[cell], results.calls[cell] = one["turns"], one["calls"]
        began = datetime.fromisoformat(read["began"])
        return cls(results, read["machine"], began, read["minutes"], read["left_out"])


def latest(runs: Sequence[Run]) -> Results:
    """Return every cell's figures from the last run that measured it."""
    results = Results()
    for run in runs:
        results.versions |= run.results.versions
        results.calls |= run.results.calls
        results.turns |= run.results.turns
    return results
