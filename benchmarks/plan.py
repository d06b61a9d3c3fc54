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
    return case.operation not in OPERATIONS or peer.library not in OPERATIONS[case.operation].without


COLLECTIVES = ("broadcast", "all_gather", "reduce_scatter", "all_to_all", "reduce", "gather", "scatter", "send_recv")
HALVES = ("all_reduce_float16", "all_reduce_bfloat16")
OVERLAP = tuple(name for name in OPERATIONS if name.startswith("overlap_"))


def full() -> list[Case]:
    """Return the cases of a full run, which takes about 20 minutes on two cores."""
    found: list[Case] = []
    for ranks in RANKS:
        found += cases(["all_reduce", "barrier"], [ranks], SIZES)
        most = 256 * MIB if ranks < 8 else 64 * MIB
        found += cases(COLLECTIVES, [ranks], [nbytes for nbytes in SIZES if nbytes <= most])
        found += cases(["bandwidth"], [ranks], [nbytes for nbytes in SIZES if nbytes <= 16 * MIB])
        if ranks < 8:
            found += cases(HALVES, [ranks], [64 * MIB])
            found += cases(["all_reduce_in_flight"], [ranks], [64 * KIB])
            found += cases(OVERLAP, [ranks], [64 * MIB])
    return found


def full_effort(case: Case) -> Effort:
    """Return how thoroughly a full run measures a case: what has a target of its own most, the slow ones less."""
    if case.nbytes > 64 * MIB:
        return Effort(rounds=3, least=2, budget=4.0, repetitions=1)
    if case.ranks > 4:
        return Effort(rounds=3, least=2, budget=1.2, repetitions=2, seconds=0.01)
    if case.operation in (*COLLECTIVES, "bandwidth"):
        return Effort(rounds=5, least=3, budget=2.4, repetitions=2)
    if case.operation in OVERLAP:
        return Effort(rounds=5, budget=4.0)
    return Effort(rounds=11, least=5, budget=8.0)


def quick() -> list[Case]:
    """Return the cases of the quick form."""
    return [
        *cases(["all_reduce"], [2], [4, 4 * KIB, 64 * KIB, MIB, 16 * MIB]),
        *cases(["barrier", "broadcast", "all_gather", "send_recv"], [2], [MIB]),
        *cases(["all_reduce_in_flight"], [2], [64 * KIB]),
        *cases(["all_reduce", "barrier"], [4], [4, 64 * KIB, MIB]),
    ]


QUICK = Effort(rounds=3, least=2, budget=1.0, repetitions=2, seconds=0.005)
