"""The cases of a run, and the time spent on each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.operations import OPERATIONS

KIB, MIB = 1 << 10, 1 << 20
RANKS, SIZES = (2, 4, 8), (4, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
COLLECTIVES = ("broadcast", "all_gather", "reduce_scatter", "all_to_all", "reduce", "gather", "scatter", "send_recv")
HALF_TYPES = ("all_reduce_float16", "all_reduce_bfloat16")
BUSY_SIZES, BUSY = (4 * KIB, MIB, 13 * 10**6), (0, 4, 8)
STORES = ("store_set", "store_get", "store_add", "store_multi_get")


class Case(NamedTuple):
    """An operation among some ranks, on arrays of some bytes (0: the operation has no array), beside busy processes."""

    operation: str
    ranks: int
    nbytes: int = 0
    busy: int = 0


class Cell(NamedTuple):
    """One figure: a case and the implementation measured."""

    case: Case
    name: str


@dataclass(frozen=True)
class Effort:
    """The time spent on a case: rounds within a budget of seconds, at least some; timings in a turn, their length.

    With ``processor``, the timings are the processor time of all ranks.
    """

    rounds: int = 11
    least: int = 3
    budget: float = 6.0
    repetitions: int = 3
    seconds: float = 0.02
    most_calls: int = 5000
    processor: bool = False

    def calls(self, seconds_a_call: float) -> int:
        """Return the calls that fit into a timing, at least one."""
        return max(1, min(self.most_calls, int(self.seconds / seconds_a_call)))


def cases(
    operations: Iterable[str], ranks: Sequence[int], sizes: Sequence[int], busy: Sequence[int] = (0,)
) -> list[Case]:
    """Return all valid combinations, grouped by the number of ranks."""
    return [
        Case(name, count, nbytes, others)
        for count in ranks
        for others in busy
        for name in operations
        if OPERATIONS[name].ranks in (None, count)
        for nbytes in (sizes if OPERATIONS[name].sized else (0,))
    ]


BUSY_CASES = cases(["all_reduce"], (2, 4), BUSY_SIZES, BUSY)


def full() -> list[Case]:
    """Return the cases of a full run: about 20 minutes on two cores."""
    found: list[Case] = []
    for ranks in RANKS:
        most = 256 * MIB if ranks < 8 else 64 * MIB
        found += cases(["all_reduce", "barrier"], [ranks], SIZES)
        found += cases(COLLECTIVES, [ranks], [nbytes for nbytes in SIZES if nbytes <= most])
        found += cases(STORES, [ranks], SIZES)
        if ranks < 8:
            found += [case for case in BUSY_CASES if case.ranks == ranks and case not in found]
            found += [*cases(HALF_TYPES, [ranks], [64 * MIB]), *cases(["all_reduce_in_flight"], [ranks], [64 * KIB])]
    return found


def full_effort(case: Case) -> Effort:
    """Return the effort of a full run: most for the cases with targets of their own, little for slow ones."""
    if case in BUSY_CASES:
        return Effort(rounds=5, least=5, seconds=0.1)
    if case.nbytes > 64 * MIB:
        return Effort(rounds=3, least=2, budget=4.0, repetitions=1)
    if case.ranks > 4:
        return Effort(rounds=3, least=2, budget=1.2, repetitions=2, seconds=0.01)
    if case.operation in COLLECTIVES:
        return Effort(rounds=5, least=3, budget=2.4, repetitions=2)
    return Effort(rounds=11, least=5, budget=8.0)


QUICK = Effort(rounds=3, least=2, budget=1.0, repetitions=2, seconds=0.005)


def quick() -> list[Case]:
    """Return the cases of the quick run."""
    return [
        *cases(["all_reduce"], [2], [4, 4 * KIB, 64 * KIB, MIB, 16 * MIB]),
        *cases(["barrier", "broadcast", "all_gather", "send_recv"], [2], [MIB]),
        *cases(["all_reduce_in_flight", *STORES], [2], [64 * KIB]),
        *cases(["all_reduce", "barrier"], [4], [4, 64 * KIB, MIB]),
    ]
