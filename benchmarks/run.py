"""The measurement: peers take turns, round by round, so that whatever else the machine does meets all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import groupby
from typing import TypeVar

from benchmarks.peers import Peer
from benchmarks.plan import Case, Cell, Effort, takes_part
from benchmarks.results import Results
from benchmarks.team import Team

Say = Callable[[str], object]
T = TypeVar("T")


def run(
    peers: Sequence[Peer],
    cases: Sequence[Case],
    effort: Callable[[Case], Effort],
    results: Results,
    say: Say = lambda line: None,
) -> None:
    """Measure every cell. Cases of one number of ranks share their rounds.

    Args:
        peers: whom to measure.
        cases: what, those of one number of ranks together.
        effort: how thoroughly, for each.
        results: what to add the figures to.
        say: takes a line of progress.

    Raises:
        PeerFailedError: a peer did not start, died, gave a wrong result or took too long.
    """
    for ranks, same_ranks in groupby(cases, lambda case: case.ranks):
        say(f"{ranks} ranks: starting {', '.join(peer.title for peer in peers)}")
        with ExitStack() as stack:
            teams = [stack.enter_context(Team(peer, ranks)) for peer in peers]
            results.versions.update({team.peer.name: team.version for team in teams})
            Rounds(teams, {case: effort(case) for case in same_ranks}, results).measure(say)


class Rounds:
    """Cases measured in common rounds: those of one case are minutes apart, in whatever mood the machine is then.

    Args:
        teams: who takes turns.
        efforts: the cases, and how thoroughly each is measured.
        results: what to add the figures to.
    """

    def __init__(self, teams: Sequence[Team], efforts: dict[Case, Effort], results: Results) -> None:
        self._teams = list(teams)
        self._efforts = efforts
        self._results = results
        self._spent = dict.fromkeys(efforts, 0.0)

    def measure(self, say: Say) -> None:
        """Go round until every case has had its rounds or its time."""
        ranks = self._teams[0].ranks
        most = max(effort.rounds for effort in self._efforts.values())
        for number in range(most):
            say(f"{ranks} ranks: round {number + 1} of {most} at most")
            for case, effort in self._efforts.items():
                used_up = number >= effort.rounds or self._spent[case] >= effort.budget
                if number < effort.least or not used_up:
                    self._round(case, effort, in_turn(self._teams, number))

    def _round(self, case: Case, effort: Effort, teams: Sequence[Team]) -> None:
        """Give every peer a turn."""
        began = time.monotonic()
        for team in teams:
            if not takes_part(team.peer, case):
                continue
            cell = Cell(case, team.peer.name)
            calls = self._results.calls.get(cell)
            if calls is None:
                calls, seconds = _first_turn(team, case, effort)
            else:
                seconds = team.measure(case.operation, case.nbytes, calls, effort.repetitions)
            self._results.add(cell, [1e6 * second for second in seconds], calls)
        self._spent[case] += time.monotonic() - began


def _first_turn(team: Team, case: Case, effort: Effort) -> tuple[int, list[float]]:
    """Return how many calls make a timing of the wanted length, and timings of as many.

    Looks again at more calls than one, which sees better: the first call of all may take long.
    """
    calls = 1
    for _ in range(4):
        seconds = team.measure(case.operation, case.nbytes, calls, effort.repetitions)
        fitting = effort.calls(min(seconds))
        if fitting <= 1.5 * calls:
            break
        calls = fitting
    return calls, seconds


def in_turn(everyone: Sequence[T], number: int) -> list[T]:
    """Return everyone in the order of a round: another one is first in each."""
    first = number % len(everyone)
    return [*everyone[first:], *everyone[:first]]
