"""Failure state of a group, and the errors that its members get.

A member that dies, or a call that fails half-way, ends the group: the first failure is kept, every wait and every later
call raises it, and the other members are informed, at the latest when the group ends here. A member that left in order
ends only the waits that need it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
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
"""Time limit of an abort that waits for full connections."""


class GroupState(ABC):
    """Failure and latest call of one rank's side of a group.

    Args:
        group: id of the group.
        name: name of the group.
        ranks: ranks of the members in the progress engine, by group rank.
        recorder: records the calls.
        lock: held while a call is queued, and while the group ends.

    Attributes:
        failure: the first failure, None while the group works.
        call: the latest call, None before the first.
        seq: its number.
        nbytes: bytes of its arrays.
        started_at: when it began, by the monotonic clock; None when it has ended.
        global_ranks: global ranks of the members, by group rank: ``ranks``, unless the world has shrunk since. Errors
            name these.
        name, ranks, recorder, lock: see above.
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
        self.name = name
        self.ranks = self.global_ranks = ranks
        self.recorder = recorder
        self.lock = lock
        self._group = group

    @property
    def id(self) -> str:
        """The group's id, as documents show it."""
        return f"{self._group:016x}"

    def matches(self, name: str) -> bool:
        """Return whether ``name`` is the group's name or id."""
        return name in (self.name, self.id)

    def global_rank(self, rank: int) -> int:
        """Return the global rank of a member."""
        return self.global_ranks[self.ranks.index(rank)]

    def active_record(self) -> Record | None:
        """Return the latest call if it is under way. For any thread; None if the call changes meanwhile."""
        for _ in range(_SNAPSHOT_ATTEMPTS):
            started, call = self.started_at, self.call
            if started is None or call is None:
                return None
            record = self, call, self.seq, started, None, "", self.nbytes
            if self.started_at == started:
                return record
        return None

    def raise_if_failed(self) -> None:
        """Raise the first failure, if there was one. Without the lock: an abort may have to be sent first."""
        if self.failure is not None:
            self.broadcast_abort()
            raise from_code(self.failure.code, self.failure.message, **self.failure.details())

    def mark_destroyed(self) -> None:
        """Record that this rank has left the group, unless the group has failed."""
        with self.lock:
            if self.failure is None:
                self.failure = GroupAbortedError(f"group {self.name!r} has been destroyed", group=self.name)

    def broadcast_abort(self) -> None:  # noqa: B027  # the agent of an attached process does
        """Inform the members of the failure, unless they know. Without the lock."""

    @abstractmethod
    def abort(self, error: BaseException) -> None:
        """End the group because of an error here, and inform the members unless they know."""


class LocalGroupState(GroupState):
    """Failure state of a group whose messages this process's progress engine moves. Ranks are the engine's.

    Args:
        engine: the progress engine.
        group: id of the group.
        name: name of the group.
        ranks: ranks of the members, by group rank.
        members: addresses and processes of the ranks, for error messages.
        recorder: records the calls.
    """

    def __init__(
        self,
        engine: ProgressEngine,
        group: int,
        name: str,
        ranks: tuple[int, ...],
        members: dict[int, Member],
        recorder: FlightRecorder,
    ) -> None:
        super().__init__(group, name, ranks, recorder, engine.lock)
        self.engine = engine
        self._members = members
        self._abort_sent = False
        self._loss: DistError | None = None
        self._lost_rank = -1

    def raise_if_peer_lost(self, waiting_for: Sequence[int], during: str, *, any_will_do: bool = False) -> None:
        """Raise if a rank that is waited for is lost; where any of them will do, if all are."""
        lost = [rank for rank in waiting_for if rank in self.engine.lost_peers]
        if lost and (len(lost) == len(waiting_for) or not any_will_do):
            self.engine.progress()  # a rank may have left because another died: that is the failure then
            self.raise_if_failed()
            raise self._peer_lost_error(lost[0], f"during {during}")

    def cannot_complete(self, waiting_for: Sequence[int], *, any_will_do: bool = False) -> bool:
        """Return whether a wait for these ranks cannot end well. With the engine's lock held."""
        if self.failure is not None:
            return True
        lost_peers = self.engine.lost_peers
        if not lost_peers:
            return False
        lost = [rank in lost_peers for rank in waiting_for]
        return bool(lost) and (all(lost) if any_will_do else any(lost))

    def timeout_error(
        self, waiting_for: Sequence[int], during: str, deadline: Deadline, seq: int | None
    ) -> CollectiveTimeoutError:
        """Return the error of a deadline that passed: it lists the ranks that arrived and those that did not."""
        names = ", ".join(self._describe(rank) for rank in waiting_for)
        arrived = ", ".join(str(self.global_rank(rank)) for rank in self.ranks if rank not in waiting_for)
        return CollectiveTimeoutError(
            f"{during} in group {self.name!r} waited {deadline.seconds:.1f} s for {names or 'the transport'}; "
            f"arrived: {arrived or 'none'}",
            ranks=[self.global_rank(rank) for rank in waiting_for],
            op=during.partition(" ")[0],
            group=self.name,
            seq=seq,
        )

    def on_peer_lost(self, rank: int) -> None:
        """Record that a peer is lost; a member that died ends the group. With the engine's lock held."""
        if rank in self.ranks and not self.engine.lost_peers[rank].clean and self.failure is None:
            self.failure = self._loss = self._peer_lost_error(rank, self._current_call())
            self._lost_rank = rank

    def rename_lost_call(self) -> None:
        """Let the failure name the call under way now, if the failure is the loss of a member.

        For calls of an attached process: its next request says which call the loss interrupted.
        """
        with self.lock:
            if self._loss is not None and self.failure is self._loss:
                self.failure = self._peer_lost_error(self._lost_rank, self._current_call())
            self._loss = None

    def on_abort(self, payload: bytes) -> None:
        """Record the failure that another member reports. With the engine's lock held."""
        self._abort_sent = True
        if self.failure is None:
            self.failure = _decode_failure(payload)

    def mark_destroyed(self) -> None:
        """See GroupState. The goodbye of this rank gives the reason, not the calls that fail here now."""
        self._abort_sent = True
        super().mark_destroyed()

    def abort(self, error: BaseException) -> None:
        """See GroupState."""
        me = self._describe(self.engine.rank)
        if isinstance(error, DistError):
            failure = error
        else:
            text = f"{me} gave up {self._current_call()}: {type(error).__name__} {error}".rstrip()
            failure = GroupAbortedError(text, ranks=[self.global_rank(self.engine.rank)], group=self.name)
        sent = failure
        if isinstance(error, CollectiveTimeoutError):  # it was this rank's deadline, not theirs
            sent = from_code(GroupAbortedError.code, f"{me} gave up: {error.message}", **error.details())
        payload = json.dumps({"code": sent.code, "message": sent.message, **sent.details()}).encode()[: frames.SMALL]
        header = frames.encode(Opcode.ABORT, group=self._group, epoch=self.engine.epoch, length=len(payload))
        with self.engine.lock:
            if self.failure is None:
                self.failure = failure
            if not self._abort_sent:
                self._abort_sent = True
                for rank in self.ranks:
                    if rank != self.engine.rank:
                        self.engine.send(rank, [header, payload])
            self.engine.unregister_sink(self._group)
        self.engine.flush(_ABORT_FLUSH_SECONDS)

    def broadcast_abort(self) -> None:
        """See GroupState. This rank may leave because of the failure, and must not be blamed.

        A member may learn of a loss later than this rank does, and of this rank's goodbye before.
        """
        failure = self.failure
        if failure is not None and not self._abort_sent:
            self.abort(failure)

    def _current_call(self) -> str:
        name = "start-up" if self.call is None else self.call.name
        busy = self.call is None or self.started_at is not None
        return f"{'during' if busy else 'after'} {name} #{self.seq}"

    def _peer_lost_error(self, rank: int, when: str) -> RankFailedError:
        lost = self.engine.lost_peers[rank]
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
        failure = json.loads(payload)
        return from_code(failure.pop("code"), failure.pop("message"), **failure)
    except (ValueError, KeyError, TypeError, AttributeError):
        return GroupAbortedError("another member gave the group up, with a message that cannot be read")
