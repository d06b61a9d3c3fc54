"""The figures of a run, and their JSON form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cases import Case, Cell


@dataclass
class Results:
    """Microseconds an operation by cell: a list of timings a round; the calls in a timing; versions by name."""

    versions: dict[str, str] = field(default_factory=dict)
    calls: dict[Cell, int] = field(default_factory=dict)
    turns: dict[Cell, list[list[float]]] = field(default_factory=dict)

    def cases(self) -> list[Case]:
        """Return the cases measured, in order."""
        return list(dict.fromkeys(cell.case for cell in self.turns))

    def add(self, cell: Cell, turn: Sequence[float], calls: int = 1) -> None:
        """Add the timings, in microseconds, of a turn."""
        self.calls[cell] = calls
        self.turns.setdefault(cell, []).append(list(turn))

    def median(self, cell: Cell) -> float:
        """Return the median of all timings of a cell."""
        return median(timing for turn in self.turns[cell] for timing in turn)

    def ratio(self, theirs: Cell, ours: Cell) -> float | None:
        """Return how many times as long theirs takes: the median of the rounds' ratios, None if either is missing.

        Within a round two turns are a moment apart; over minutes, a virtual machine's speed changes by more than that.
        """
        if theirs not in self.turns or ours not in self.turns:
            return None
        rounds = zip(self.turns[theirs], self.turns[ours], strict=False)  # one of two cases may have had more rounds
        return median(median(theirs) / median(ours) for theirs, ours in rounds)


@dataclass
class Run:
    """A run of the benchmark; ``left_out`` has a line about each implementation or part that was not measured."""

    results: Results
    machine: dict[str, str]
    began: datetime
    minutes: float = 0.0
    left_out: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
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
                    "peer": cell.name,
                    "median": round(results.median(cell), 3),
                    "calls": results.calls[cell],
                    "turns": [[round(timing, 3) for timing in turn] for turn in turns],
                }
                for cell, turns in results.turns.items()
            ],
        }

    @classmethod
    def read(cls, path: Path) -> Run:
        """Return the run of a JSON file."""
        return cls.from_json(json.loads(path.read_text()))

    @classmethod
    def from_json(cls, read: dict[str, Any]) -> Run:
        """Return the run that ``as_json`` was made of."""
        results = Results(versions=read["versions"])
        for one in read["cells"]:
            cell = Cell(Case(one["operation"], one["ranks"], one["nbytes"], one.get("busy", 0)), one["peer"])
            results.turns[cell], results.calls[cell] = one["turns"], one["calls"]
        began = datetime.fromisoformat(read["began"])
        return cls(results, read["machine"], began, read["minutes"], read["left_out"])
