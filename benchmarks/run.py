"""The measurement: peers take turns, round by round, so that whatever else the machine does meets all of them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import median

from benchmarks.peers import Peer
from benchmarks.plan import Case, Cell, Effort, takes_part
from benchmarks.summary import Summary, summarize
from benchmarks.team import Team

Say = Callable[[str], object]


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

    def summary(self, cell: Cell) -> Summary:
        """Return all of a cell's timings in a few numbers."""
        return summarize([timing for turn in self.turns[cell] for timing in turn])

    def ratio(self, case: Case, theirs: str, ours: str) -> float | None:
        """Return how many times as long their peer takes, round by round, in the median; None if not both were there.

        Within a round two peers' turns are a moment apart. Over minutes a virtual machine's speed changes by more than
        the peers differ, so that a ratio of overall medians may compare one's good minutes with the other's bad ones.
        """
        their_turns, our_turns = self.turns.get(Cell(case, theirs)), self.turns.get(Cell(case, ours))
        if their_turns is None or our_turns is None:
            return None
        rounds = zip(their_turns, our_turns, strict=True)
        return median(median(theirs) / median(ours) for theirs, ours in rounds)


def run(
    peers: Sequence[Peer], cases: Sequence[Case], effort: Callable[[Case], Effort], say: Say = lambda line: None
) -> Results:
    """Measure every cell. Cases of one operation and number of ranks share their rounds.

    Args:
        peers: whom to measure.
        cases: what, those of one number of ranks together.
        effort: how thoroughly, for each.
        say: takes a line of progress.

    Raises:
        PeerFailedError: a peer did not start, died, gave a wrong result or took too long.
    """
    results = Results()
    for ranks, same_ranks in groupby(cases, lambda case: case.ranks):
        say(f"{ranks} ranks: starting {', '.join(peer.title for peer in peers)}")
        with ExitStack() as stack:
            teams = [stack.enter_context(Team(peer, ranks, _folder(stack))) for peer in peers]
            results.versions.update({team.peer.name: team.version for team in teams})
            for operation, block in groupby(same_ranks, lambda case: case.operation):
                say(f"{ranks} ranks: {operation}")
                _Block(teams, {case: effort(case) for case in block}, results).measure()
    return results


class _Block:
    """Cases measured in common rounds."""

    def __init__(self, teams: Sequence[Team], efforts: dict[Case, Effort], results: Results) -> None:
        self._teams = list(teams)
        self._efforts = efforts
        self._results = results
        self._spent = dict.fromkeys(efforts, 0.0)

    def measure(self) -> None:
        """Go round until every case has had its rounds or its time."""
        for number in range(max(effort.rounds for effort in self._efforts.values())):
            first = number % len(self._teams)
            for case, effort in self._efforts.items():
                used_up = number >= effort.rounds or self._spent[case] >= effort.budget
                if number < effort.least or not used_up:
                    self._round(case, effort, self._teams[first:] + self._teams[:first])

    def _round(self, case: Case, effort: Effort, teams: Sequence[Team]) -> None:
        """Give every peer a turn."""
        began = time.monotonic()
        for team in teams:
            if not takes_part(team.peer, case):
                continue
            cell = Cell(case, team.peer.name)
            if cell not in self._results.calls:
                self._results.calls[cell] = _calibrate(team, case, effort)
            seconds = team.measure(case.operation, case.nbytes, self._results.calls[cell], effort.repetitions)
            self._results.turns.setdefault(cell, []).append([1e6 * second for second in seconds])
        self._spent[case] += time.monotonic() - began


def _calibrate(team: Team, case: Case, effort: Effort) -> int:
    """Return how many calls make a timing of the wanted length; looks again at as many, which sees better."""
    calls = 1
    for _ in range(3):
        seconds = min(team.measure(case.operation, case.nbytes, calls, repetitions=2 if calls > 1 else 1))
        fitting = effort.calls(seconds)
        if fitting <= calls:
            break
        calls = fitting
    return calls


def _folder(stack: ExitStack) -> Path:
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rankmesh-bench-")))
