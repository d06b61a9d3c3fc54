"""What is measured, and how often."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.operations import OPERATIONS
from benchmarks.peers import Peer

KIB, MIB = 1 << 10, 1 << 20

RANKS = (2, 4, 8)
SIZES = (4, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)


class Case(NamedTuple):
    """What peers are compared on: an operation, with so many ranks, on arrays of so many bytes (0: it has none)."""

    operation: str
    ranks: int
    nbytes: int


class Cell(NamedTuple):
    """One figure to measure: a case and a peer."""

    case: Case
    peer: str


@dataclass(frozen=True)
class Effort:
    """How much time to spend on a case.

    Attributes:
        rounds: how often every peer gets its turn, at most.
        least: and at least, also when the time is used up.
        budget: seconds for a case; a round is not begun when they are used up.
        repetitions: timings a peer takes in a turn.
        seconds: how long one timing should take; it is of as many calls as fit, at least one.
        most_calls: but not of more calls than this.
    """

    rounds: int = 11
    least: int = 3
    budget: float = 6.0
    repetitions: int = 3
    seconds: float = 0.02
    most_calls: int = 5000

    def calls(self, seconds_a_call: float) -> int:
        """Return of how many calls a timing is, when one takes about so long."""
        return max(1, min(self.most_calls, int(self.seconds / seconds_a_call)))


def cases(operations: Iterable[str], ranks: Sequence[int], sizes: Sequence[int]) -> list[Case]:
    """Return all combinations that there are, those of one number of ranks together."""
    return [
        Case(name, count, nbytes)
        for count in ranks
        for name in operations
        if not OPERATIONS[name].ranks or count in OPERATIONS[name].ranks
        for nbytes in (sizes if OPERATIONS[name].sized else (0,))
    ]


def takes_part(peer: Peer, case: Case) -> bool:
    """Whether a peer can do a case at all."""
    return peer.library not in OPERATIONS[case.operation].without
