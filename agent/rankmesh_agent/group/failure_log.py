"""First failures of one rank's groups, in the order in which they happened: the first explains why the rank ends."""

from __future__ import annotations

import time
from collections.abc import Collection
from functools import partial

from rankmesh_agent.group.state import GroupState
from rankmesh_agent.wire.errors import CollectiveMismatchError, DistError


class FailureLog:
    """First failures of the groups that a rank has not left. For several threads."""

    def __init__(self) -> None:
        self._failures: dict[GroupState, tuple[DistError, float]] = {}
        self._replaced: list[GroupState] = []
        self._end: tuple[GroupState, DistError] | None = None

    def add_group(self, state: GroupState) -> None:
        """Record the failure of a group from now on."""
        state.on_failure.append(partial(self.record, state))

    def record(self, state: GroupState, error: DistError) -> None:
        """Record the failure of a group; the first one of a group counts."""
        self._failures.setdefault(state, (error, time.monotonic()))

    def record_end(self, state: GroupState, error: DistError) -> None:
        """Record an error of a group that ends the rank's process, whatever failed before."""
        self._end = state, error

    def remove_group(self, state: GroupState) -> None:
        """Forget a group that the rank leaves: the rank goes on without it."""
        self._failures.pop(state, None)

    def replace_group(self, state: GroupState) -> None:
        """Forget a group that the rank leaves, once another one has been made."""
        self._replaced.append(state)

    def on_group_made(self) -> None:
        """Forget the replaced groups: the rank goes on with the group that has been made."""
        while self._replaced:
            self.remove_group(self._replaced.pop())

    def first(self) -> DistError | None:
        """Return the first failure, None while all groups work."""
        return next((error for error, _ in self._failures.copy().values()), None)

    def naming(self, ranks: Collection[int]) -> DistError | None:
        """Return the first failure that names one of these ranks, None if there is none."""
        failures = self._failures.copy().values()
        return next((error for error, _ in failures if set(error.ranks).intersection(ranks)), None)

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
            found = [(state, error) for state, (error, at) in self._failures.copy().items() if at >= since]
            if not found:
                return None, []
            state, error = found[0]
        blamed = [] if isinstance(error, CollectiveMismatchError) else state.job_ranks(error)
        return error, [each for each in blamed if each != rank]
