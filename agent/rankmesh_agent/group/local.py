"""Communicator over this process's progress engine."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from rankmesh_agent.backends.base import Backend
from rankmesh_agent.backends.cpu import CpuBackend, HierarchicalCpuBackend
from rankmesh_agent.backends.custom import CustomBackend
from rankmesh_agent.backends.registered import Outcome
from rankmesh_agent.backends.segment_setup import SegmentOptions, create_segment
from rankmesh_agent.backends.self import SelfBackend
from rankmesh_agent.collectives.hosts import HierarchicalLink, layout_of
from rankmesh_agent.collectives.select import Algorithm
from rankmesh_agent.group.call_monitor import CallMonitor
from rankmesh_agent.group.call_queue import CallQueue
from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.group.flight_recorder import RecordedCalls
from rankmesh_agent.group.local_state import LocalGroupState
from rankmesh_agent.group.messages import GroupMessages
from rankmesh_agent.group.options import Options
from rankmesh_agent.group.state import START_UP
from rankmesh_agent.group.work import Work
from rankmesh_agent.progress.framing import FrameSink
from rankmesh_agent.progress.matching import MessageMatcher
from rankmesh_agent.progress.message_link import MessageLink
from rankmesh_agent.progress.status import Status
from rankmesh_agent.shared_memory.segment import Segment
from rankmesh_agent.wire.errors import DistError, DistNetworkError
from rankmesh_agent.wire.frames import Header, Opcode
from rankmesh_agent.wire.goodbye import Goodbye
from rankmesh_agent.wire.ops import OpType

Array = np.ndarray[Any, Any]
# Read off their class once: Python 3.11 takes 0.1 µs each time, much in a call of a few.
_ENTER, _PART, _ABORT = Opcode.ENTER, Opcode.PART, Opcode.ABORT


class LocalCommunicator(Communicator, FrameSink):
    """One rank's side of a group whose messages this process's progress engine moves."""

    state: LocalGroupState
    link: MessageLink

    def __init__(self, state: LocalGroupState, timeout: float) -> None:
        engine = self.engine = state.engine
        group = state.group
        super().__init__(group, state.name, state.ranks, engine.rank, timeout)
        self.state = state
        self.recorder = state.recorder
        self.link = MessageLink(engine, group, self.ranks, self.rank)
        self.link.departed = self.state.departed
        self.link.describe = lambda: str(self.state.call)
        self.launch_monitor = CallMonitor(state, self.link.launches)
        self.matcher = MessageMatcher(engine, group, self.state.global_rank, self.state.on_misfit)
        self.messages = GroupMessages(self.state, self.matcher)
        self.queue = CallQueue(self.state, SelfBackend() if self.size == 1 else CpuBackend(self.link))
        self.submit = self.queue.submit
        self.message_at_once = self.messages.at_once
        self._others = frozenset(self.ranks) - {engine.rank}
        self._left = self._closed = False
        self.recorder.add_group(self)
        engine.register_sink(group, self)
        engine.status_sources.append(self._statuses)

    def use_backend(self, backend: Backend) -> None:
        """See Communicator; a backend with a transport for messages carries these, too."""
        super().use_backend(backend)
        if self.batch is None:
            self.submit, self.at_once = self.queue.fastest
        self.messages.transport = self.queue.backend.messages or self.matcher
        self.message_at_once = self.messages.at_once

    def set_global_ranks(self, global_ranks: tuple[int, ...]) -> None:
        super().set_global_ranks(global_ranks)
        self.messages.renumber()

    def use_custom_backend(self, name: str, engine: Any) -> None:
        self.use_backend(CustomBackend(name, engine, self.link))

    def peer_lost_error(self, members: Sequence[int], during: str) -> DistError | None:
        try:
            self.state.raise_if_peer_lost([self.ranks[member] for member in members], during)
        except DistError as error:
            return error
        return None

    def raise_if_member_lost(self, during: str) -> None:
        """Raise the group's failure, or the error of the loss of a member, which the call ``during`` finds out."""
        self.state.broadcast_abort()
        self.state.raise_if_failed()
        error = self.peer_lost_error([member for member in range(self.size) if member != self.rank], during)
        if error is not None:
            raise error

    def start(self, hosts: Sequence[Hashable], options: SegmentOptions, timeout: float) -> None:
        """Wait for the other members, and choose the backend; a collective call. Raises as ``set_up``.

        Args:
            hosts: equal for members that see the same shared memory, by group rank.
        """
        self._segment_options = options
        if self.size == 1:
            return
        layout, created = layout_of(hosts), list[Segment | None]()
        try:
            self.set_up(lambda link: created.append(create_segment(link, layout, options)), timeout)
        except DistNetworkError as error:
            error.ranks = tuple(self.global_ranks[member] for member in error.ranks)
            raise
        (segment,) = created
        if segment is None:
            self.use_backend(self.queue.backend)
        elif len(layout) > 1:
            self.use_backend(HierarchicalCpuBackend(self.link, HierarchicalLink(self.link, segment, layout)))
        else:
            self.use_backend(CpuBackend(self.link, segment))
            processes = options.agreement.processes if options.agreement is not None else ()
            if processes:
                segment.allow_reads([processes[rank] for rank in self.ranks])
            else:
                self.set_up(lambda shared: shared.probe_reads(), timeout)
        failure = self.state.failure
        if failure is not None and failure.op == START_UP.name:
            self.state.raise_if_failed()  # a member that gave up had sent all that this one has waited for

    def empty(self, dtype: np.dtype[Any], count: int, options: Options) -> Array:
        queue, shared = self.queue, self._segment_options
        outcome: Outcome = []
        if not queue.backend.allocates:
            return np.empty(count, dtype)
        arguments = shared.directory, shared.job, count * dtype.itemsize, outcome
        given = options._replace(on_complete=lambda: queue.use_backend(queue.backend))
        queue.submit((OpType.EMPTY, dtype, count), arguments, given)
        made = outcome[0]
        if isinstance(made, DistNetworkError):
            raise made
        return made.view(dtype)

    def set_up(self, step: Algorithm, timeout: float, over: str = "", seq: int | None = 0) -> None:
        """Execute a step of the group's set-up as a call, in which the members compare which ranks make the group.

        Args:
            step: takes what the backend gives its algorithms.
            seq: the call's number; None for the next one.

        Raises:
            CollectiveMismatchError: the members do not make the same group.
            DistBackendError: a member is missing, or failed.
        """
        key = OpType.NEW_GROUP, None, 0, None, None, None, f"ranks={list(self.ranks)}{over}"
        self.queue.execute(self.queue.plan(key, step), (), Options(timeout), seq)

    # Point-to-point

    def send(self, array: Array, rank: int, tag: int, options: Options) -> Work | None:
        return self.messages.transfer("send", array, rank, tag, options)[0]

    def receive(self, array: Array, rank: int, tag: int, options: Options) -> Work | int:
        work, transfer = self.messages.transfer("recv", array, rank, tag, options)
        if work is not None:
            return work
        state = self.state
        return state.global_ranks[state.ranks.index(transfer.source)]  # state.global_rank, without the call

    def recorded(self) -> Sequence[RecordedCalls]:
        return [self.queue, self.messages]

    def leave(self, how: Goodbye | None = None) -> None:
        """End the group at this rank as far as others notice: queued calls fail. Does not wait for a thread.

        Args:
            how: for the errors of members that wait for this rank, unless the group has failed; None if these get the
                goodbye of this process.
        """
        if self._left:
            return
        self._left = True
        self.state.broadcast_abort()
        if how is not None:
            self.state.leave(how)
        self.queue.backend.leave()
        with self.engine.lock:
            self.state.mark_destroyed()
        self.engine.unregister_sink(self.id)
        with self.engine.lock:
            self.engine.status_sources.remove(self._statuses)

    def close(self) -> None:
        self.leave()
        if self._closed:
            return
        self._closed = True
        self.queue.close()
        self.state.forget_wait()
        self.recorder.remove_group(self)

    def _statuses(self) -> list[Status]:
        return self.state.statuses() + self.messages.statuses()

    def end_in_child(self) -> None:
        self._closed = True
        super().end_in_child()

    # FrameSink: with the engine's lock held

    def buffer_for(self, rank: int, header: Header) -> memoryview | None:
        if header.opcode is _PART:
            return self.link.buffer_for(rank, header)
        return self.matcher.buffer_for(rank, header)

    def on_peer_lost(self, rank: int) -> None:
        self.state.on_peer_lost(rank)
        self.queue.backend.on_peer_lost()

    def exposed_to(self) -> set[int]:
        return {announced.rank for announced in self.matcher.announced.values()}

    def on_frame(self, rank: int, header: Header, payload: memoryview | bytes) -> None:
        opcode = header.opcode
        if rank not in self._others:
            return
        if opcode is _ENTER or opcode is _PART:
            self.link.on_frame(rank, header, payload)
        elif opcode is _ABORT:
            if header.part:
                self.state.on_departure(rank, bytes(payload))
            else:
                self.state.on_abort(bytes(payload))
        else:
            self.matcher.on_frame(rank, header, payload)
