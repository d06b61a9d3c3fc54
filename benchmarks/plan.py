"""What is measured: the cells, how often, and the prototypes' figures to compare with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

KIB, MIB = 1 << 10, 1 << 20

RANKS = (2, 4)
SIZES = (4, 64 * KIB, MIB, 64 * MIB)


class Cell(NamedTuple):
    """One figure to measure: a peer, with so many ranks, on an array of so many bytes."""

    peer: str
    ranks: int
    nbytes: int


class Figures(NamedTuple):
    """A range of microseconds a call; both ends are equal where DESIGN section 3 gives one figure."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """What ratios are taken to."""
        return (self.low + self.high) / 2


PROTOTYPES = {
    Cell("rankmesh-shm", 2, 4): Figures(3.9, 3.9),
    Cell("rankmesh-shm", 2, 64 * KIB): Figures(14, 14),
    Cell("rankmesh-shm", 2, MIB): Figures(83, 83),
    Cell("rankmesh-shm", 2, 64 * MIB): Figures(9_791, 9_791),
    Cell("rankmesh-shm", 4, 4): Figures(30, 30),
    Cell("rankmesh-shm", 4, 64 * KIB): Figures(67, 67),
    Cell("rankmesh-shm", 4, MIB): Figures(277, 277),
    Cell("rankmesh-shm", 4, 64 * MIB): Figures(28_559, 28_559),
    Cell("rankmesh-tcp", 2, 4): Figures(21, 21),
    Cell("rankmesh-tcp", 2, 64 * KIB): Figures(67, 67),
    Cell("rankmesh-tcp", 2, MIB): Figures(300, 500),
    Cell("rankmesh-tcp", 2, 64 * MIB): Figures(31_600, 35_100),
    Cell("rankmesh-tcp", 4, 4): Figures(92, 92),
    Cell("rankmesh-tcp", 4, 64 * KIB): Figures(231, 231),
    Cell("rankmesh-tcp", 4, MIB): Figures(1_360, 1_470),
    Cell("rankmesh-tcp", 4, 64 * MIB): Figures(101_000, 105_400),
}
"""The table of DESIGN section 3: throwaway programs without checks, timeouts or a public API, best of 3."""


@dataclass(frozen=True)
class Effort:
    """How much time to spend.

    Attributes:
        ranks: the world sizes.
        sizes: the array sizes in bytes.
        rounds: how often every peer gets its turn.
        repetitions: timings a peer takes in a turn, for each size.
        seconds: how long one timing should take; it is of as many calls as fit, at least one.
        most_calls: but not of more calls than this.
    """

    ranks: tuple[int, ...] = RANKS
    sizes: tuple[int, ...] = SIZES
    rounds: int = 11
    repetitions: int = 3
    seconds: float = 0.08
    most_calls: int = 5000

    def calls(self, seconds_a_call: float) -> int:
        """Return of how many calls a timing is, when one takes about so long."""
        return max(1, min(self.most_calls, int(self.seconds / seconds_a_call)))


FULL = Effort()
QUICK = Effort(rounds=2, seconds=0.02)
