"""First failures of one rank's groups, in the order in which they happened: the first explains why the rank ends."""

from __future__ import annotations

from functools import partial

from rankmesh_agent.group.state import GroupState
from rankmesh_agent.wire.errors import DistError


class FailureLog:
    """First failures of the groups that a rank has not left. For several threads."""

    def __init__(self) -> None:
        self._failures: dict[GroupState, DistError] = {}
        self._replaced: list[GroupState] = []

    def add_group(self, state: GroupState) -> None:
        """Record the failure of a group from now on."""
        state.on_failure.append(partial(self.record, state))

    def record(self, state: GroupState, error: DistError) -> None:
        """Record the failure of a group; the first one of a group counts."""
        self._failures.setdefault(state, error)

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
        return next(iter(self._failures.copy().values()), None)

    def first_elsewhere(self, rank: int) -> tuple[DistError | None, list[int]]:
        """Return the first failure and the ranks of the job that it names, without ``rank``."""
        state, error = next(iter(self._failures.copy().items()), (None, None))
        if state is None or error is None:
            return None, []
        return error, [each for each in state.job_ranks(error) if each != rank]
