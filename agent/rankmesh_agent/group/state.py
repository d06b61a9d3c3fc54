"""Whether a group can go on, and what its members are told when it cannot.

A member that dies, or a call that fails half-way, ends the group: the first failure is kept, every wait and every later
call raises it, and the other members are told, at the latest when the group ends here. A member that said goodbye ends
only the waits that need it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from rankmesh_agent.group.flight_recorder import FlightRecorder, Record
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.progress.engine import ProgressEngine
from rankmesh_agent.wire import frames
from rankmesh_agent.wire.errors import (
    CollectiveTimeoutError,
    DistError,
    GroupAbortedError,
    RankFailedError,
    from_code,
)
from rankmesh_agent.wire.frames import Opcode
from rankmesh_agent.wire.ops import Call
from rankmesh_agent.wire.schemas import Member

_SNAPSHOT_ATTEMPTS = 3
_ABORT_FLUSH_SECONDS = 0.5
"""Seconds that telling the members may take when a connection is full."""


class BaseGroupState:
    """Failure and latest call of a group, at the process of one of its ranks.

    Args:
        group: id of the group.
        name: the group's name for people.
        ranks: global ranks of the members, by group rank.
        recorder: records the calls.
        lock: held while a call is queued, and while the group ends.

    Attributes:
        failure: the first failure, None while the group can go on.
        call: the latest call, None before the first.
        seq: its number.
        nbytes: see Record.
        started_at: when it began, by the monotonic clock; None when it has ended.
        global_ranks: ranks of the members in the user's world, by group rank: ``ranks``, unless the world has shrunk.
            Errors name ranks by them.
    """

    def __init__(
        self,
        group: int,
        name: str,
        ranks: tuple[int, ...],
        recorder: FlightRecorder,
        lock: AbstractContextManager[Any],
    ) -> None:
        self.failure: DistError | None = None
        self.call: Call | None = None
        self.seq = 0
        self.nbytes = 0
        self.started_at: float | None = None
        self.recorder = recorder
        self.lock = lock
        self.name = name
        self.ranks = self.global_ranks = ranks
        self._group = group

    @property
    def id(self) -> str:
        """The group's id, as users see it."""
        return f"{self._group:016x}"

    def matches(self, name: str) -> bool:
        """Return whether that is the group's name or id."""
        return name in (self.name, self.id)

    def active_record(self) -> Record | None:
        """Return the latest call if it is in progress. For any thread; None if calls come and go meanwhile."""
        for _ in range(_SNAPSHOT_ATTEMPTS):
            begun, call = self.started_at, self.call
            if begun is None or call is None:
                return None
            record = self, call, self.seq, begun, None, "", self.nbytes
            if self.started_at == begun:
                return record
        return None

    def global_rank(self, rank: int) -> int:
        """Return a member's rank in the user's world."""
        return self.global_ranks[self.ranks.index(rank)]

    def raise_if_failed(self) -> None:
        """Raise the first failure, if there was one."""
        if self.failure is not None:
            raise from_code(self.failure.code, self.failure.message, **self.failure.details())

    def mark_destroyed(self) -> None:
        """Record that this rank has left the group."""
        if self.failure is None:
            self.failure = GroupAbortedError(f"group {self.name!r} has been destroyed", group=self.name)


class LocalGroupState(BaseGroupState):
    """State of a group whose messages this process carries.

    Args:
        mesh: the process's connections.
        group: id of the group.
        name: the group's name for people.
        ranks: global ranks of the members, by group rank.
        members: the job's members, by rank.
        recorder: records the calls.
    """

    def __init__(
        self,
        mesh: ProgressEngine,
        group: int,
        name: str,
        ranks: tuple[int, ...],
        members: dict[int, Member],
        recorder: FlightRecorder,
    ) -> None:
        super().__init__(group, name, ranks, recorder, mesh.lock)
        self._abort_sent = False
        self._loss: DistError | None = None
        self._lost = -1
        self.mesh = mesh
        self._members = members

    def raise_if_failed(self) -> None:
        """Raise the first failure, if there was one, and report it to the members. Without the mesh's lock."""
        if self.failure is not None:
            self.broadcast_abort()
        super().raise_if_failed()

    def raise_if_peer_lost(self, waiting_for: Sequence[int], words: str, *, any_will_do: bool = False) -> None:
        """Raise if a rank that is waited for is gone; where any of them will do, if all are."""
        gone = [rank for rank in waiting_for if rank in self.mesh.lost_peers]
        if gone and (len(gone) == len(waiting_for) or not any_will_do):
            self.mesh.progress()  # who left may have done so because of one that died: that one is the failure then
            self.raise_if_failed()
            raise self._peer_lost_error(gone[0], f"during {words}")

    def cannot_complete(self, waiting_for: Sequence[int], *, any_will_do: bool = False) -> bool:
        """Whether waiting for these ranks is in vain. With the mesh's lock held."""
        if self.failure is not None:
            return True
        lost = self.mesh.lost_peers
        if not lost:
            return False
        gone = [rank in lost for rank in waiting_for]
        return bool(gone) and (all(gone) if any_will_do else any(gone))

    def timeout_error(
        self, waiting_for: Sequence[int], words: str, deadline: Deadline, seq: int | None
    ) -> CollectiveTimeoutError:
        """Return the error of a deadline that passed."""
        names = ", ".join(self._describe(rank) for rank in waiting_for)
        arrived = ", ".join(str(self.global_rank(rank)) for rank in self.ranks if rank not in waiting_for)
        return CollectiveTimeoutError(
            f"{words} in group {self.name!r} waited {deadline.seconds:.1f} s for {names or 'the transport'}; "
            f"arrived: {arrived or 'none'}",
            ranks=[self.global_rank(rank) for rank in waiting_for],
            op=words.partition(" ")[0],
            group=self.name,
            seq=seq,
        )

    def on_peer_lost(self, rank: int) -> None:
        """Take note that a peer is gone; a member that died ends the group. With the mesh's lock held."""
        if rank in self.ranks and not self.mesh.lost_peers[rank].clean and self.failure is None:
            self.failure = self._loss = self._peer_lost_error(rank, self._current_call())
            self._lost = rank

    def rename_lost_call(self) -> None:
        """Have the loss of a member, if that is the failure, name the call that is under way now.

        For calls that are made in another process: which one a member was lost in is not known before it asks.
        """
        with self.lock:
            if self._loss is not None and self.failure is self._loss:
                self.failure = self._peer_lost_error(self._lost, self._current_call())
            self._loss = None

    def on_abort(self, payload: bytes) -> None:
        """Take note of the failure another member describes. With the mesh's lock held."""
        self._abort_sent = True
        if self.failure is None:
            self.failure = _decode_failure(payload)

    def mark_destroyed(self) -> None:
        """Record that this rank has left the group: its goodbye gives the reason, not the calls that fail here now."""
        self._abort_sent = True
        super().mark_destroyed()

    def abort(self, error: BaseException) -> None:
        """End the group because of an error here, and tell the members unless they know."""
        me = self._describe(self.mesh.rank)
        if isinstance(error, DistError):
            failure = error
        else:
            text = f"{me} gave up {self._current_call()}: {type(error).__name__} {error}".rstrip()
            failure = GroupAbortedError(text, ranks=[self.global_rank(self.mesh.rank)], group=self.name)
        told = failure
        if isinstance(error, CollectiveTimeoutError):  # it was our deadline, not theirs
            told = from_code(GroupAbortedError.code, f"{me} gave up: {error.message}", **error.details())
        payload = json.dumps({"code": told.code, "message": told.message, **told.details()}).encode()[: frames.SMALL]
        header = frames.encode(Opcode.ABORT, group=self._group, epoch=self.mesh.epoch, length=len(payload))
        with self.mesh.lock:
            if self.failure is None:
                self.failure = failure
            if not self._abort_sent:
                self._abort_sent = True
                for rank in self.ranks:
                    if rank != self.mesh.rank:
                        self.mesh.send(rank, [header, payload])
            self.mesh.drop_sink(self._group)
        self.mesh.flush(_ABORT_FLUSH_SECONDS)

    def broadcast_abort(self) -> None:
        """Tell the members of a failure, unless they know: this rank may leave because of it, and must not be blamed.

        Each of them may learn of a loss later than this rank does, and of this one's goodbye before. Without the
        mesh's lock.
        """
        failure = self.failure
        if failure is not None and not self._abort_sent:
            self.abort(failure)

    def _current_call(self) -> str:
        name = "start-up" if self.call is None else self.call.name
        busy = self.call is None or self.started_at is not None
        return f"{'during' if busy else 'after'} {name} #{self.seq}"

    def _peer_lost_error(self, rank: int, when: str) -> RankFailedError:
        lost = self.mesh.lost_peers[rank]
        how = f"left ({lost.cause or 'it was done'})" if lost.clean else f"failed ({lost.cause})"
        return RankFailedError(
            f"{self._describe(rank)} {how} {when} in group {self.name!r}",
            ranks=[self.global_rank(rank)],
            op=when.split(" ")[1],
            group=self.name,
        )

    def _describe(self, rank: int) -> str:
        member = self._members.get(rank)
        number = self.global_rank(rank)
        return replace(member, rank=number).described() if member is not None else f"rank {number}"


def _decode_failure(payload: bytes) -> DistError:
    try:
        said = json.loads(payload)
        return from_code(said.pop("code"), said.pop("message"), **said)
    except (ValueError, KeyError, TypeError, AttributeError):
        return GroupAbortedError("another member gave the group up, with a message that cannot be read")
