"""Arrivals of the ranks at a group's calls, as far as a rank has heard: for the names in the errors of a wait.

In a small group a rank that waits for long announces itself to all ranks, in a large one to its neighbours in the
overlay. An announcement has all arrivals that its sender has heard of, and is repeated when there are more, so that
after about log2 size announcements every rank that waits knows which ranks are missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from rankmesh_agent.collectives.link import FEW_RANKS
from rankmesh_agent.wire.overlay import neighbours

_SECONDS = 0.05
"""Seconds after which a rank that waits announces itself."""
_SECONDS_EACH = 0.02
"""The same for each member of a small group: there are many such messages, and the ranks arrive further apart."""
_SECONDS_LARGE = 0.3
"""Seconds between announcements in a large group."""
_MAX_AHEAD = 16
"""Calls ahead of this rank's whose announcements are kept."""
_MAX_FINGERPRINTS = 2
"""Fingerprints of one such call that are kept: of two, one differs from this rank's."""
_NONE: frozenset[int] = frozenset()


class Arrivals:
    """Arrivals at one call, and at the next one: no rank is further ahead.

    Args:
        rank: this rank in the group.
        size: ranks in the group.

    Attributes:
        seconds: see above.
        neighbours: the ranks to which this rank announces itself.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.seconds = max(_SECONDS, _SECONDS_EACH * size) if size <= FEW_RANKS else _SECONDS_LARGE
        self.neighbours = neighbours(rank, size, FEW_RANKS)
        self._size = size
        self._own = 1 << rank
        self._known = self._announced = 0
        self._everyone = (1 << size) - 1
        self._ahead: dict[int, tuple[int, Set[int]]] = {}

    def begin(self, seq: int) -> Set[int]:
        """Begin a call; return the fingerprints of the calls that announcements for it have had."""
        self._known = self._announced = 0
        if not self._ahead:
            return _NONE
        self._known, fingerprints = self._ahead.pop(seq, (0, _NONE))
        self._ahead = {later: heard for later, heard in self._ahead.items() if later > seq}
        return fingerprints

    def heard(self, mask: bytes) -> None:
        """Record an announcement."""
        self._known |= int.from_bytes(mask, "little") & self._everyone

    def heard_ahead(self, seq: int, fingerprint: int, mask: bytes) -> None:
        """Record an announcement for a call that this rank has not begun; of many calls, for the first ones."""
        known, fingerprints = self._ahead.get(seq, (0, _NONE))
        if len(fingerprints) < _MAX_FINGERPRINTS:
            fingerprints |= {fingerprint}
        self._ahead[seq] = known | int.from_bytes(mask, "little") & self._everyone, fingerprints
        if len(self._ahead) > _MAX_AHEAD:
            del self._ahead[max(self._ahead)]

    def add(self, ranks: Iterable[int]) -> None:
        """Record ranks that have arrived."""
        for rank in ranks:
            self._known |= 1 << rank

    def announcement(self) -> bytes:
        """Return the announcement to send; empty if the neighbours know all of it."""
        known = self._known | self._own
        if known == self._announced or (self._announced and self._size <= FEW_RANKS):
            return b""
        self._announced = known
        return known.to_bytes(-(-self._size // 8), "little")

    def missing(self) -> list[int]:
        """Return the ranks of which no arrival is known."""
        known = self._known | self._own
        return [rank for rank in range(self._size) if not known >> rank & 1]
