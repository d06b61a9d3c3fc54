"""A group at one rank: the order of its calls, its queue, its messages, and how it fails.

Calls have one sequence number a group. A synchronous call with nothing queued runs in the caller's thread; asynchronous
calls, and synchronous ones behind them, go through one worker thread. When a call fails half-way, or a member dies, the
group is given up: everyone is told the first failure, and every call, now and later, raises it.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rankmesh_agent.collectives.link import octets
from rankmesh_agent.collectives.select import Algorithm
from rankmesh_agent.engine.backends.base import Backend
from rankmesh_agent.engine.backends.mesh import MeshBackend, share_memory
from rankmesh_agent.engine.mesh import Lost, Mesh, Port, Transfer
from rankmesh_agent.engine.p2p import ANY, Matching
from rankmesh_agent.engine.rounds import MessageLink
from rankmesh_agent.engine.work import MessageWork, QueuedWork, Work
from rankmesh_agent.transports.segment import Segment
from rankmesh_agent.wire import frames
from rankmesh_agent.wire.deadline import Deadline
from rankmesh_agent.wire.dtypes import code_of
from rankmesh_agent.wire.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistError,
    GroupAbortedError,
    RankFailedError,
    from_code,
)
from rankmesh_agent.wire.frames import Header, Opcode
from rankmesh_agent.wire.ops import Call, Kind, ReduceOp
from rankmesh_agent.wire.schemas import GroupInfo, Member

After = Callable[[], None] | None
"""What to do with the arrays once the data is there (copy a staged one back)."""

_PLANS = 1024


class _Plan(NamedTuple):
    call: Call
    algorithm: Algorithm


class _Running:
    """One call under way: a backends.base.Watch."""

    __slots__ = ("_communicator", "_deadline", "call", "seq")

    def __init__(self, communicator: Communicator, call: Call, seq: int, deadline: Deadline) -> None:
        self._communicator = communicator
        self._deadline = deadline
        self.call = call
        self.seq = seq

    def check(self, missing: list[int]) -> None:
        """See Watch."""
        communicator = self._communicator
        communicator.mesh.progress()
        communicator.raise_if_failed()
        waiting_for = [communicator.ranks[member] for member in missing]
        communicator.raise_if_left(waiting_for, self.words())
        if self._deadline.passed():
            raise communicator.late(waiting_for, self.words(), self._deadline, self.seq)

    def wait(self, ready: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        """See Watch."""
        communicator = self._communicator

        mesh = communicator.mesh

        def settled() -> bool:
            if ready():
                return True
            if communicator.failure is None and not mesh.lost:
                return False
            return communicator.hopeless([communicator.ranks[member] for member in missing()])

        if mesh.wait(settled, self._deadline) and communicator.failure is None and not mesh.lost:
            return
        with mesh.lock:
            if ready():
                return
            waiting_for = missing()
        self.check(waiting_for)
        raise communicator.late(
            [communicator.ranks[member] for member in waiting_for], self.words(), self._deadline, self.seq
        )

    def words(self) -> str:
        """The call in words."""
        return f"{self.call.name} #{self.seq}"


class _Message:
    """One point-to-point message under way; what MessageWork asks for."""

    def __init__(
        self,
        communicator: Communicator,
        transfer: Transfer,
        words: str,
        partners: list[int],
        deadline: Deadline,
        after: After,
    ) -> None:
        self.transfer = transfer
        self.deadline = deadline
        self._communicator = communicator
        self._words = words
        self._partners = partners
        self._after = after

    def settle(self, deadline: Deadline | None) -> bool:
        """Wait for the message until a deadline, or with None just look; return whether it is done, or raise."""
        communicator, transfer = self._communicator, self.transfer
        try:
            if deadline is None:
                communicator.mesh.progress()
            else:
                communicator.mesh.wait(lambda: transfer.done or self._hopeless(), deadline)
            if not transfer.done:
                communicator.raise_if_failed()
                communicator.raise_if_left(self._partners, self._words, any_will_do=True)
                if deadline is None:
                    return False
                raise communicator.late(self._partners, self._words, deadline, None)
        except BaseException as error:
            # A wait shorter than the operation's own deadline may end without ending the operation.
            if deadline is self.deadline or not isinstance(error, DistError):
                communicator.abandon(transfer, error)
            raise
        if transfer.error is not None:
            raise transfer.error
        if self._after is not None:
            self._after()
            self._after = None
        return True

    def _hopeless(self) -> bool:
        return self._communicator.hopeless(self._partners, any_will_do=True)


class Communicator(Port):
    """One rank's side of a group.

    Args:
        mesh: the process's connections.
        group: id of the group, equal at all members.
        name: name for people.
        ranks: global ranks of the members, by group rank; this process is one.
        members: who the ranks are, by global rank, for error messages.
        timeout: default seconds a call may take.
    """

    def __init__(
        self, mesh: Mesh, group: int, name: str, ranks: Sequence[int], members: dict[int, Member], timeout: float
    ) -> None:
        self.mesh = mesh
        self.id = group
        self.name = name
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(mesh.rank)
        self.size = len(self.ranks)
        self.timeout = timeout
        self.failure: DistError | None = None
        self._members = members
        self._link = MessageLink(mesh, group, self.ranks, self.rank)
        self._matching = Matching(mesh, group)
        self._backend: Backend = MeshBackend(self._link, self.ranks, None)
        self._plans: dict[Any, _Plan] = {}
        self._seq = 0
        self._last = ""
        self._turn = threading.Lock()
        self._queue: queue.SimpleQueue[QueuedWork | None] = queue.SimpleQueue()
        self._queued = 0
        self._worker: threading.Thread | None = None
        self._closed = False
        mesh.open_port(group, self)

    @property
    def medium(self) -> str:
        """What carries the collectives: ``shm``, ``tcp`` or ``self``."""
        return self._backend.medium

    def start(
        self, *, share: bool, directory: str, job: str, slot_bytes: int, crowded: bool, strict: bool, timeout: float
    ) -> None:
        """Meet the other members and set up what the calls run over; a collective call.

        Args:
            share: whether this member may share memory with all others.
            directory: where shared memory is made.
            job: part of its name.
            slot_bytes: bytes of a slot.
            crowded: whether the host has more ranks than cores.
            strict: whether it is an error if memory cannot be shared.
            timeout: seconds to wait for the others.

        Raises:
            CollectiveMismatchError: the members do not make the same group.
            DistBackendError: a member is missing, or failed.
        """
        call = Call(Kind.NEW_GROUP, subject=f"ranks={list(self.ranks)}")
        running = _Running(self, call, 0, Deadline(timeout))
        if self.size == 1:
            return
        segment: Segment | None = None

        def share_it(link: MessageLink) -> None:
            nonlocal segment
            segment = share_memory(
                link,
                share=share,
                directory=directory,
                job=job,
                slot_bytes=slot_bytes,
                crowded=crowded,
                strict=strict,
            )

        self._carry_out(share_it, (), running)
        self._backend = MeshBackend(self._link, self.ranks, segment)

    # Collectives: arrays are one-dimensional, contiguous and of a supported dtype

    def all_reduce(
        self, array: np.ndarray[Any, Any], op: ReduceOp, timeout: float, async_op: bool, user: list[Any], after: After
    ) -> Work | None:
        """Reduce ``array`` over all members, in place."""
        plan = self._plan(Kind.ALL_REDUCE, array.dtype, array.size, op, None)
        return self._submit(plan, (array, op), timeout, async_op, user, after)

    def broadcast(
        self, array: np.ndarray[Any, Any], root: int, timeout: float, async_op: bool, user: list[Any], after: After
    ) -> Work | None:
        """Copy the array of group rank ``root`` to all members."""
        plan = self._plan(Kind.BROADCAST, array.dtype, array.size, None, root)
        return self._submit(plan, (array, root), timeout, async_op, user, after)

    def all_gather(
        self,
        outputs: Sequence[np.ndarray[Any, Any]],
        array: np.ndarray[Any, Any],
        timeout: float,
        async_op: bool,
        user: list[Any],
        after: After,
    ) -> Work | None:
        """Copy every member's ``array`` to the output of its group rank."""
        plan = self._plan(Kind.ALL_GATHER, array.dtype, array.size, None, None)
        return self._submit(plan, (outputs, array), timeout, async_op, user, after)

    def barrier(self, timeout: float, async_op: bool) -> Work | None:
        """Wait until all members have come."""
        return self._submit(self._plan(Kind.BARRIER, None, 0, None, None), (), timeout, async_op, [], None)

    # Point-to-point: ranks are global

    def send(
        self, array: np.ndarray[Any, Any], rank: int, tag: int, timeout: float, async_op: bool, user: list[Any]
    ) -> Work | None:
        """Send ``array`` to a rank."""
        self.raise_if_failed()
        with self.mesh.lock:
            transfer = self._matching.send(rank, octets(array), code_of(array.dtype), tag)
        message = _Message(self, transfer, f"send to rank {rank} (tag {tag})", [rank], Deadline(timeout), None)
        return self._follow_up(message, async_op, user)

    def receive(
        self,
        array: np.ndarray[Any, Any],
        rank: int,
        tag: int,
        timeout: float,
        async_op: bool,
        user: list[Any],
        after: After,
    ) -> Work | int:
        """Receive into ``array`` from a rank, or from ANY; return the source's rank, or the Work."""
        self.raise_if_failed()
        with self.mesh.lock:
            transfer = self._matching.receive(rank, octets(array), code_of(array.dtype), tag)
        sources = [member for member in self.ranks if member != self.mesh.rank] if rank == ANY else [rank]
        where = "any rank" if rank == ANY else f"rank {rank}"
        message = _Message(self, transfer, f"recv from {where} (tag {tag})", sources, Deadline(timeout), after)
        work = self._follow_up(message, async_op, user)
        return transfer.source if work is None else work

    def _follow_up(self, message: _Message, async_op: bool, user: list[Any]) -> Work | None:
        if not async_op:
            message.settle(message.deadline)
            return None
        with self.mesh.lock:
            if not message.transfer.done:
                self.mesh.hold(self.id, message.transfer)
        return MessageWork(message.settle, user, message.deadline, lambda: message.transfer.source)

    # What others ask

    def info(self) -> GroupInfo:
        """Return the group as this member sees it."""
        failure = self.failure.message if self.failure is not None else ""
        return GroupInfo(f"{self.id:016x}", self.name, list(self.ranks), self._seq, self.medium, self._last, failure)

    def close(self) -> None:
        """End the group at this member: queued calls fail, the worker ends. Does nothing the second time."""
        if self._closed:
            return
        self._closed = True
        if self.failure is None:
            self.failure = GroupAbortedError(f"group {self.name!r} has been destroyed", group=self.name)
        self.mesh.close_port(self.id)
        if self._worker is not None:
            self._queue.put(None)
            if self._worker is not threading.current_thread():
                self._worker.join()
        with self._turn:
            self._backend.close()

    # Failure

    def raise_if_failed(self) -> None:
        """Raise the group's first failure, if there was one."""
        if self.failure is not None:
            raise from_code(self.failure.code, self.failure.message, **self.failure.details())

    def raise_if_left(self, waiting_for: Sequence[int], words: str, *, any_will_do: bool = False) -> None:
        """Raise if a rank that is waited for has left; where any of them will do, if all have."""
        gone = [rank for rank in waiting_for if rank in self.mesh.lost]
        if gone and (len(gone) == len(waiting_for) or not any_will_do):
            raise self._gone(gone[0], words)

    def hopeless(self, waiting_for: Sequence[int], *, any_will_do: bool = False) -> bool:
        """Whether waiting for these ranks is in vain. With the mesh's lock held."""
        if self.failure is not None:
            return True
        gone = [rank in self.mesh.lost for rank in waiting_for]
        return bool(gone) and (all(gone) if any_will_do else any(gone))

    def late(self, waiting_for: Sequence[int], words: str, deadline: Deadline, seq: int | None) -> DistError:
        """Return the error of a deadline that passed."""
        names = ", ".join(self._described(rank) for rank in waiting_for)
        arrived = ", ".join(str(rank) for rank in self.ranks if rank not in waiting_for)
        return CollectiveTimeoutError(
            f"{words} in group {self.name!r} waited {deadline.seconds:.1f} s for {names or 'the transport'}; "
            f"arrived: {arrived or 'none'}",
            ranks=waiting_for,
            op=words.partition(" ")[0],
            group=self.name,
            seq=seq,
        )

    def lost(self, rank: int) -> None:
        """Take note that a peer is gone; a member that died ends the group. With the mesh's lock held."""
        lost = self.mesh.lost[rank]
        if rank in self.ranks and not lost.clean and self.failure is None:
            self.failure = self._gone(rank, f"{self._last} #{self._seq}" if self._last else "start-up")

    def _gone(self, rank: int, words: str) -> RankFailedError:
        lost: Lost = self.mesh.lost[rank]
        how = f"left ({lost.cause or 'it was done'})" if lost.clean else f"failed ({lost.cause})"
        return RankFailedError(
            f"{self._described(rank)} {how} during {words} in group {self.name!r}",
            ranks=[rank],
            op=words.partition(" ")[0],
            group=self.name,
        )

    def _described(self, rank: int) -> str:
        member = self._members.get(rank)
        return member.described() if member is not None else f"rank {rank}"

    def abandon(self, transfer: Transfer, error: BaseException) -> None:
        """Undo a message that will not be waited for any longer; if its data is on the way, give the group up."""
        with self.mesh.lock:
            undone = transfer.done or self._matching.cancel(transfer)
        if not undone:
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        """Record the group's first failure and tell the members."""
        if isinstance(error, DistError):
            failure, told = error, error
        else:
            text = f"{self._described(self.mesh.rank)} gave up {self._last}: {type(error).__name__} {error}".rstrip()
            failure = told = GroupAbortedError(text, group=self.name)
        if isinstance(error, CollectiveTimeoutError):
            told = from_code(
                GroupAbortedError.code, f"{self._described(self.mesh.rank)} gave up: {error.message}", **error.details()
            )
        payload = json.dumps({"code": told.code, "message": told.message, **told.details()}).encode()
        header = frames.encode(Opcode.ABORT, group=self.id, epoch=self.mesh.epoch, length=len(payload))
        with self.mesh.lock:
            if self.failure is None:
                self.failure = failure
                for rank in self.ranks:
                    if rank != self.mesh.rank:
                        self.mesh.send(rank, [header, payload])
            self.mesh.drop_port(self.id)

    # Port: with the mesh's lock held

    def place(self, rank: int, header: Header) -> memoryview | None:
        """See Port."""
        if header.opcode is Opcode.PART:
            return self._link.place(rank, header)
        return self._matching.place(rank, header)

    def deliver(self, rank: int, header: Header, payload: memoryview | bytes) -> None:
        """See Port."""
        if rank not in self.ranks:
            return
        if header.opcode in (Opcode.ENTER, Opcode.PART):
            self._link.deliver(rank, header, payload)
        elif header.opcode is Opcode.ABORT:
            if self.failure is None:
                self.failure = _told(bytes(payload))
        else:
            self._matching.deliver(rank, header, payload)

    # The order of calls

    def _plan(
        self, kind: Kind, dtype: np.dtype[Any] | None, count: int, op: ReduceOp | None, root: int | None
    ) -> _Plan:
        key = (kind, dtype, count, op, root)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            call = Call(kind, dtype, count, op, root)
            plan = self._plans[key] = _Plan(call, self._backend.algorithm(call))
        return plan

    def _submit(
        self, plan: _Plan, arguments: Sequence[Any], timeout: float, async_op: bool, user: list[Any], after: After
    ) -> Work | None:
        if not async_op and not self._queued and self._turn.acquire(blocking=False):
            try:
                self._run(plan, arguments, Deadline(timeout), after)
            finally:
                self._turn.release()
            return None
        work = self._enqueue(plan, arguments, timeout, user, after)
        if async_op:
            return work
        work.wait()
        return None

    def _enqueue(
        self, plan: _Plan, arguments: Sequence[Any], timeout: float, user: list[Any], after: After
    ) -> QueuedWork:
        self.raise_if_failed()

        def run() -> None:
            with self._turn:
                self._run(plan, arguments, Deadline(timeout), after)

        work = QueuedWork(run, user, plan.call.name)
        with self.mesh.lock:
            self._queued += 1
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name=f"rankmesh-{self.name}", daemon=True)
                self._worker.start()
        self._queue.put(work)
        return work

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            work.run()
            with self.mesh.lock:
                self._queued -= 1

    def _run(self, plan: _Plan, arguments: Sequence[Any], deadline: Deadline, after: After) -> None:
        if self.failure is not None:
            self.raise_if_failed()
        call = plan.call
        self._seq += 1
        self._last = call.name
        if self.size > 1:
            self._carry_out(plan.algorithm, arguments, _Running(self, call, self._seq, deadline))
        elif call.kind is Kind.ALL_GATHER:
            arguments[0][0][:] = arguments[1]
        if after is not None:
            after()

    def _carry_out(self, algorithm: Algorithm, arguments: Sequence[Any], running: _Running) -> None:
        try:
            self._backend.run(algorithm, arguments, running)
        except CollectiveMismatchError:
            raise  # nothing has moved, everyone knows: the group goes on
        except BaseException as error:
            self._give_up(error)
            raise


def _told(payload: bytes) -> DistError:
    """Return the failure another member describes."""
    try:
        said = json.loads(payload)
        return from_code(said.pop("code"), said.pop("message"), **said)
    except (ValueError, KeyError, TypeError, AttributeError):
        return GroupAbortedError("another member gave the group up, with a message that cannot be read")
