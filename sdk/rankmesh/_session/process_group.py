"""ProcessGroup: a group of ranks as users hold it."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

from rankmesh._session.backend import Engines
from rankmesh_agent.wire.errors import GroupAbortedError

if TYPE_CHECKING:
    from rankmesh_agent.group.communicator import Communicator


class ProcessGroup:
    """A group of ranks, this process among them. Made by init_process_group and new_group, not by hand."""

    bound_device_id: Final = None
    """torch's name for the group's GPU: each array is on a known one."""

    def __init__(self, communicator: Communicator, engines: Engines, description: str = "") -> None:
        self._communicator = communicator
        self._engines = engines
        self._description = description

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._communicator.rank

    def size(self) -> int:
        """Return the number of members."""
        return self._communicator.size

    def name(self) -> str:
        """Return the name of the backend, as torch's ProcessGroup does."""
        return self._engines.name

    @property
    def group_name(self) -> str:
        """The group's name, the same at all members: ``world`` for the default group."""
        return self._communicator.name

    @property
    def group_desc(self) -> str:
        """The description given to new_group; ``undefined`` without one."""
        return self._description or "undefined"

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Set the default time that later operations may take, as timedelta or seconds."""
        self._communicator.set_timeout(timeout)

    def abort(self) -> None:
        """End the group at all members: operations under way, and later ones, raise GroupAbortedError."""
        error = GroupAbortedError(f"rank {self.rank()} called abort() on the group", group=self.group_name)
        self._communicator.abort(error)

    def __repr__(self) -> str:
        return f"<ProcessGroup {describe(self._communicator, self.group_name)}>"


def describe(comm: Communicator, name: str) -> str:
    """Return what a group's repr has: its name, this process's rank, the medium, the calls and the failure."""
    failure = "" if comm.failure is None else f", failed: {comm.failure}"
    return f"{name!r}, rank {comm.rank} of {comm.size}, {comm.medium}, {comm.state.seq} calls{failure}"


class NonMember:
    """The value of new_group on ranks outside the group; collectives on it do nothing."""

    def __repr__(self) -> str:
        return "GroupMember.NON_GROUP_MEMBER"


NON_MEMBER: Final = NonMember()

Group = ProcessGroup | NonMember | None
