"""The measurement: peers take turns, round by round, so that whatever else the machine does meets all of them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.peers import Peer
from benchmarks.plan import Cell, Effort
from benchmarks.summary import Summary, summarize
from benchmarks.team import Team


@dataclass
class Results:
    """What came out.

    Attributes:
        peers: who was measured.
        effort: how thoroughly.
        versions: of each peer, by its name.
        calls: of how many calls each timing is, for each cell.
        turns: microseconds a call, for each cell, in each round a list of timings.
    """

    peers: Sequence[Peer]
    effort: Effort
    versions: dict[str, str] = field(default_factory=dict)
    calls: dict[Cell, int] = field(default_factory=dict)
    turns: dict[Cell, list[list[float]]] = field(default_factory=dict)

    def summary(self, cell: Cell) -> Summary:
        """Return all of a cell's timings in a few numbers."""
        return summarize([timing for turn in self.turns[cell] for timing in turn])

    def ratio(self, theirs: Cell, ours: Cell) -> float:
        """Return how many times as long theirs takes, round by round, in the median.

        Within a round two peers' turns are a moment apart. Over minutes a virtual machine's speed changes by more than
        the peers differ, so that a ratio of overall medians may compare one's good minutes with the other's bad ones.
        """
        rounds = zip(self.turns[theirs], self.turns[ours], strict=True)
        return median(median(theirs) / median(ours) for theirs, ours in rounds)


def run(peers: Sequence[Peer], effort: Effort, say: Callable[[str], object] = lambda line: None) -> Results:
    """Measure every cell.

    Args:
        peers: whom to measure.
        effort: how thoroughly.
        say: takes a line of progress.

    Raises:
        PeerFailedError: a peer did not start, died, gave a wrong result or took too long.
    """
    results = Results(peers, effort)
    for ranks in effort.ranks:
        say(f"{ranks} ranks: starting {', '.join(peer.title for peer in peers)}")
        with ExitStack() as stack:
            teams = [stack.enter_context(Team(peer, ranks, _folder(stack))) for peer in peers]
            results.versions.update({team.peer.name: team.version for team in teams})
            for turn in range(effort.rounds):
                say(f"{ranks} ranks: round {turn + 1} of {effort.rounds}")
                first = turn % len(teams)
                _round(teams[first:] + teams[:first], results)
    return results


def _round(teams: Sequence[Team], results: Results) -> None:
    """Give every peer a turn at every size."""
    effort = results.effort
    for nbytes in effort.sizes:
        for team in teams:
            cell = Cell(team.peer.name, team.ranks, nbytes)
            if cell not in results.calls:
                results.calls[cell] = _calibrate(team, nbytes, effort)
            seconds = team.measure(nbytes, results.calls[cell], effort.repetitions)
            results.turns.setdefault(cell, []).append([1e6 * second for second in seconds])


def _calibrate(team: Team, nbytes: int, effort: Effort) -> int:
    """Return how many calls make a timing of the wanted length; looks again at as many, which sees better."""
    calls = 1
    for _ in range(3):
        fitting = effort.calls(min(team.measure(nbytes, calls, repetitions=3)))
        if fitting <= calls:
            break
        calls = fitting
    return calls


def _folder(stack: ExitStack) -> Path:
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rankmesh-bench-")))
