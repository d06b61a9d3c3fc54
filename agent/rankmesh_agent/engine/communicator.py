"""A group at one rank: the order of its calls, its queue, and its messages.

Calls have one sequence number a group. A synchronous call with nothing queued runs in the caller's thread; asynchronous
calls, and synchronous ones behind them, go through one worker thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rankmesh_agent.collectives.link import octets
from rankmesh_agent.collectives.select import Algorithm
from rankmesh_agent.engine.backends.base import Backend
from rankmesh_agent.engine.backends.mesh import MeshBackend, share_memory
from rankmesh_agent.engine.mesh import Mesh
from rankmesh_agent.engine.p2p import ANY, Matching
from rankmesh_agent.engine.peer import Port, Transfer
from rankmesh_agent.engine.rounds import MessageLink
from rankmesh_agent.engine.standing import Standing
from rankmesh_agent.engine.waits import After, Message, RunningCall
from rankmesh_agent.engine.work import MessageWork, QueuedWork, Work
from rankmesh_agent.transports.segment import Segment
from rankmesh_agent.wire.deadline import Deadline
from rankmesh_agent.wire.dtypes import code_of
from rankmesh_agent.wire.errors import (
    CollectiveMismatchError,
    DistError,
)
from rankmesh_agent.wire.frames import Header, Opcode
from rankmesh_agent.wire.ops import Call, Kind, ReduceOp
from rankmesh_agent.wire.schemas import GroupInfo, Member

_PLANS = 1024
_WORKER_SECONDS = 5.0
"""How long closing waits for the call under way, which the failure ends, and its callbacks."""


class _Plan(NamedTuple):
    call: Call
    algorithm: Algorithm


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
        self._others = frozenset(self.ranks) - {mesh.rank}
        self.timeout = timeout
        self._standing = Standing(mesh, group, name, self.ranks, members)
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
    def failure(self) -> DistError | None:
        """The first failure, None while the group can go on."""
        return self._standing.failure

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
        running = RunningCall(self._standing, call, 0, Deadline(timeout))
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
        self._standing.raise_if_failed()
        with self.mesh.lock:
            transfer = self._matching.send(rank, octets(array), code_of(array.dtype), tag)
        message = self._message(transfer, f"send to rank {rank} (tag {tag})", [rank], timeout, None)
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
        self._standing.raise_if_failed()
        with self.mesh.lock:
            transfer = self._matching.receive(rank, octets(array), code_of(array.dtype), tag)
        sources = [member for member in self.ranks if member != self.mesh.rank] if rank == ANY else [rank]
        where = "any rank" if rank == ANY else f"rank {rank}"
        message = self._message(transfer, f"recv from {where} (tag {tag})", sources, timeout, after)
        work = self._follow_up(message, async_op, user)
        return transfer.source if work is None else work

    def _message(self, transfer: Transfer, words: str, partners: list[int], timeout: float, after: After) -> Message:
        return Message(self._standing, self._matching, transfer, words, partners, Deadline(timeout), after)

    def _follow_up(self, message: Message, async_op: bool, user: list[Any]) -> Work | None:
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
        with self.mesh.lock:
            self._standing.destroyed()
        self.mesh.close_port(self.id)
        if self._worker is not None:
            self._queue.put(None)
            if self._worker is not threading.current_thread():
                self._worker.join(_WORKER_SECONDS)
        self._backend.close()

    # Port: with the mesh's lock held

    def place(self, rank: int, header: Header) -> memoryview | None:
        """See Port."""
        if header.opcode is Opcode.PART:
            return self._link.place(rank, header)
        return self._matching.place(rank, header)

    def lost(self, rank: int) -> None:
        """See Port."""
        self._standing.lost(rank)

    def deliver(self, rank: int, header: Header, payload: memoryview | bytes) -> None:
        """See Port."""
        opcode = header.opcode
        if rank not in self._others:
            return
        if opcode is Opcode.ENTER or opcode is Opcode.PART:
            self._link.deliver(rank, header, payload)
        elif opcode is Opcode.ABORT:
            self._standing.told(bytes(payload))
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
        if not async_op and threading.current_thread() is self._worker:
            raise RuntimeError(
                f"a synchronous {plan.call.name} in a callback would wait for itself: use async_op=True there"
            )
        work = self._enqueue(plan, arguments, timeout, user, after)
        if async_op:
            return work
        try:
            work.wait()
        except KeyboardInterrupt as error:
            self._standing.give_up(error)  # the worker must not go on with the caller's array
            raise
        return None

    def _enqueue(
        self, plan: _Plan, arguments: Sequence[Any], timeout: float, user: list[Any], after: After
    ) -> QueuedWork:
        def run() -> None:
            with self._turn:
                self._run(plan, arguments, Deadline(timeout), after)

        work = QueuedWork(run, user, plan.call.name)
        with self.mesh.lock:
            self._standing.raise_if_failed()  # close() takes the lock, too: nothing is queued behind its end mark
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
        if self._standing.failure is not None:
            self._standing.raise_if_failed()
        call = plan.call
        self._seq += 1
        self._last = call.name
        standing = self._standing
        standing.call, standing.seq, standing.busy = call.name, self._seq, True
        if self.size > 1:
            self._carry_out(plan.algorithm, arguments, RunningCall(self._standing, call, self._seq, deadline))
        elif call.kind is Kind.ALL_GATHER:
            arguments[0][0][:] = arguments[1]
        if after is not None:
            after()
        standing.busy = False

    def _carry_out(self, algorithm: Algorithm, arguments: Sequence[Any], running: RunningCall) -> None:
        try:
            self._backend.run(algorithm, arguments, running)
        except CollectiveMismatchError:
            raise  # nothing has moved, everyone knows: the group goes on
        except BaseException as error:
            self._standing.give_up(error)
            raise
