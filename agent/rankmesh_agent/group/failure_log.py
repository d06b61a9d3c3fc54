"""First failures of one rank's groups, in the order in which they happened: the first explains why the rank ends."""

from __future__ import annotations

from collections.abc import Collection
from operator import itemgetter

from rankmesh_agent.group.state import GroupState
from rankmesh_agent.wire.errors import CollectiveMismatchError, DistError


class FailureLog:
    """First failures of the groups that a rank has not left. For several threads."""

    def __init__(self) -> None:
        self._groups: dict[GroupState, None] = {}
        self._replaced: list[GroupState] = []
        self._end: tuple[GroupState, DistError] | None = None

    def add_group(self, state: GroupState) -> None:
        """Have the failure of a group count from now on."""
        self._groups[state] = None

    def record_end(self, state: GroupState, error: DistError) -> None:
        """Record an error of a group that ends the rank's process, whatever failed before."""
        self._end = state, error

    def remove_group(self, state: GroupState) -> None:
        """Forget a group that the rank leaves: the rank goes on without it."""
        self._groups.pop(state, None)

    def replace_group(self, state: GroupState) -> None:
        """Forget a group that the rank leaves, once another one has been made."""
        self._replaced.append(state)

    def on_group_made(self) -> None:
        """Forget the replaced groups: the rank goes on with the group that has been made."""
        while self._replaced:
            self.remove_group(self._replaced.pop())

    def first(self) -> DistError | None:
        """Return the first failure, None while all groups work."""
        return next((error for _, error, _ in self._failures()), None)

    def naming(self, ranks: Collection[int]) -> DistError | None:
        """Return the first failure that names one of these ranks, None if there is none."""
        return next((error for _, error, _ in self._failures() if set(error.ranks).intersection(ranks)), None)

    def reason_to_end(self, rank: int, since: float) -> tuple[DistError | None, list[int]]:
        """Return the failure because of which the rank's process ends, and the ranks of the job that it blames.

        A mismatch names the ranks that made another call than most, but which of the calls is wrong is not known.

        Args:
            rank: this rank, which is left out.
            since: the rank has gone on after failures before that time.
        """
        if self._end is not None:
            state, error = self._end
        else:
            found = [(state, error) for at, error, state in self._failures() if at >= since]
            if not found:
                return None, []
            state, error = found[0]
        blamed = [] if isinstance(error, CollectiveMismatchError) else state.job_ranks(error)
        return error, [each for each in blamed if each != rank]

    def _failures(self) -> list[tuple[float, DistError, GroupState]]:
        """Return the failures, the first one first, each with its time and its group."""
        groups = [(state.failed_at, state.failure, state) for state in self._groups.copy()]
        found = [(at, error, state) for at, error, state in groups if at is not None and error is not None]
        return sorted(found, key=itemgetter(0))
