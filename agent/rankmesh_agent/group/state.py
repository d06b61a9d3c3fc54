"""State of a group at one rank: its first failure, and its current call.

A member that dies, or a call that fails half-way, ends the group: the first failure is kept, every wait and every later
call raises it, and the other members are informed, at the latest when the group ends here. A member that left in order
ends only the waits that need it.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from rankmesh_agent.group.flight_recorder import FlightRecorder, Record
from rankmesh_agent.group.options import Details
from rankmesh_agent.native import core
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.fork import reset_lock
from rankmesh_agent.wire.errors import DistError, GroupAbortedError, without_traceback
from rankmesh_agent.wire.ops import Call, OpType

START_UP = Call(OpType.NEW_GROUP)
"""Stands for the latest call before the first one."""
_SNAPSHOT_ATTEMPTS = 3


class GroupState(ABC, object if core is None else core.State):  # type: ignore[misc]  # of call, failure and seq
    """Failure and latest call of one rank's side of a group: the ``backends.base.CallContext`` of its calls.

    Args:
        ranks: ranks of the members in the progress engine, by group rank.
        lock: held while a call is queued, and while the group ends.

    Attributes:
        failure: the first failure, None while the group works.
        call: the latest call, START_UP before the first.
        started_at: when it began, by the monotonic clock; None when it has ended.
        on_failure: called with the lock held when the group fails.
        global_ranks: global ranks of the members, by group rank: ``ranks``, unless the world has shrunk since. Errors
            name these.
    """

    def __init__(
        self, group: int, name: str, ranks: tuple[int, ...], recorder: FlightRecorder, lock: AbstractContextManager[Any]
    ) -> None:
        self.failure: DistError | None = None
        self.failed_at: float | None = None
        self.call = START_UP
        self.seq = 0
        self.nbytes = 0
        self.started_at: float | None = None
        self.deadline = Deadline(0)
        self.details: Details = None
        self.on_failure: Callable[[], object] = lambda: None
        self.name = name
        self.ranks = self.global_ranks = ranks
        self.recorder = recorder
        self.lock = lock
        self.group = group

    @property
    def id(self) -> str:
        """The group's id, as documents show it."""
        return f"{self.group:016x}"

    def matches(self, name: str) -> bool:
        """Return whether ``name`` is the group's name or id."""
        return name in (self.name, self.id)

    def global_rank(self, rank: int) -> int:
        """Return the global rank of a member."""
        return self.global_ranks[self.ranks.index(rank)]

    def job_ranks(self, error: DistError) -> list[int]:
        """Return the ranks in the job of the members that an error of this group names."""
        return [rank for rank, number in zip(self.ranks, self.global_ranks, strict=True) if number in error.ranks]

    def renumber(self, global_ranks: tuple[int, ...]) -> None:
        """Change the ranks by which errors name the members."""
        self.global_ranks = global_ranks

    def active_record(self) -> Record | None:
        """Return the latest call if it is under way. For any thread; None if the call changes meanwhile."""
        for _ in range(_SNAPSHOT_ATTEMPTS):
            started = self.started_at
            if started is None:
                return None
            record = self, self.call, self.seq, started, None, "", self.nbytes
            if self.started_at == started:
                return record
        return None

    def raise_if_failed(self) -> None:
        """Raise the first failure, if there was one."""
        if self.failure is not None:
            raise without_traceback(self.failure)

    def fail(self, error: DistError) -> None:
        """Record the group's failure; the first one counts."""
        with self.lock:
            if self.failure is None:
                self.failure, self.failed_at = error, time.monotonic()
                self.recorder.on_failure(error, None)
                self.on_failure()

    def mark_destroyed(self) -> None:
        """Record that this rank has left the group, unless the group has failed. That is no failure."""
        with self.lock:
            if self.failure is None:
                self.failure = GroupAbortedError(f"group {self.name!r} has been destroyed", group=self.name)

    def end_in_child(self) -> None:
        """End the group in a forked child, without a message to the members."""
        reset_lock(self.lock)
        self.failure = GroupAbortedError(
            f"group {self.name!r} is the group of process {os.getppid()}, which has forked this one: a forked child is "
            "not a rank; call init_process_group in it to join a job of its own",
            group=self.name,
        )

    def broadcast_abort(self) -> None:  # the agent of an attached process does
        """Inform the members of the failure, if there is one and they do not know: this rank makes no call with them.

        Without the lock. A call that fails half-way does so by ``abort``.
        """

    @abstractmethod
    def abort(self, error: BaseException) -> None:
        """End the group because of an error here, and inform the members unless they know."""

    # The call under way: see CallContext

    def describe(self) -> str:
        return "" if self.details is None else self.details()

    def check(self, missing: Callable[[], list[int]]) -> None:
        self.raise_if_failed()  # the agent of an attached process checks the peers

    def wait(
        self, ready: Callable[[], bool], missing: Callable[[], list[int]], idle: Callable[[], object] | None = None
    ) -> None:
        raise NotImplementedError
