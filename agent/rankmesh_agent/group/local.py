"""Communicator over this process's progress engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from rankmesh_agent.backends.base import Backend, MessageTransport
from rankmesh_agent.backends.cpu import CpuBackend, HierarchicalCpuBackend
from rankmesh_agent.backends.segment_setup import SegmentOptions, create_segment
from rankmesh_agent.backends.self import SelfBackend
from rankmesh_agent.collectives.hierarchical.topology import HierarchicalLink, layout_of
from rankmesh_agent.collectives.link import as_bytes
from rankmesh_agent.group.call_queue import CallQueue, Options
from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.group.delegation import DelegatedBackend, DelegatedCalls
from rankmesh_agent.group.flight_recorder import FlightRecorder, MessageLog, OpStats, Record, in_flight
from rankmesh_agent.group.pending import LocalActiveCall, PendingMessage
from rankmesh_agent.group.state import LocalGroupState
from rankmesh_agent.group.work import MessageWork, Work
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.progress.engine import ProgressEngine
from rankmesh_agent.progress.framing import FrameSink, Transfer
from rankmesh_agent.progress.matching import ANY, MessageMatcher
from rankmesh_agent.progress.message_link import MessageLink
from rankmesh_agent.transports.segment import Segment
from rankmesh_agent.wire.dtypes import code_of
from rankmesh_agent.wire.errors import DistError
from rankmesh_agent.wire.frames import Header, Opcode
from rankmesh_agent.wire.ops import OpType
from rankmesh_agent.wire.schemas import InFlight, Member

Array = np.ndarray[Any, Any]
_log = logging.getLogger("rankmesh")
# Read off their class once: Python 3.11 takes 0.1 µs each time, much in a call of a few.
_ENTER, _PART, _ABORT = Opcode.ENTER, Opcode.PART, Opcode.ABORT


class LocalCommunicator(Communicator, FrameSink):
    """One rank's side of a group whose messages this process's progress engine moves.

    Args:
        engine: moves the messages.
        group: id of the group, equal at all members.
        name: name of the group.
        ranks: ranks of the members in the job, by group rank; this process is one.
        members: addresses and processes of the ranks, for error messages.
        timeout: default seconds a call may take.
        recorder: records the calls and messages.

    Attributes:
        engine, recorder: see above.
        matcher: matches the engine's point-to-point messages to receives.
        active_call: the collective call under way.
        delegated_calls: the calls that an attached process executes in this rank's place.
    """

    state: LocalGroupState
    link: MessageLink

    def __init__(
        self,
        engine: ProgressEngine,
        group: int,
        name: str,
        ranks: Sequence[int],
        members: dict[int, Member],
        timeout: float,
        recorder: FlightRecorder,
    ) -> None:
        super().__init__(group, name, ranks, engine.rank, timeout)
        self.engine = engine
        self.recorder = recorder
        self.state = LocalGroupState(engine, group, name, self.ranks, members, recorder)
        self.link = MessageLink(engine, group, self.ranks, self.rank)
        self.matcher = MessageMatcher(engine, group, self.state.global_rank)
        self.active_call = LocalActiveCall(self.state)
        backend = SelfBackend() if self.size == 1 else CpuBackend(self.link)
        self.queue = CallQueue(self.state, self.active_call, name, backend)
        self.delegated_calls = DelegatedCalls(self.state, self.link)
        self._submit = self.queue.submit
        self._others = frozenset(self.ranks) - {engine.rank}
        self._sources = tuple(member for member in self.ranks if member != engine.rank)
        self._messages = MessageLog(recorder)
        self._transport: MessageTransport = self.matcher
        self._closed = False
        recorder.add_group(self)
        engine.register_sink(group, self)

    def use_backend(self, backend: Backend) -> None:
        """See Communicator; a backend with a transport for messages carries these, too."""
        super().use_backend(backend)
        self._transport = self.queue.backend.messages or self.matcher

    def peer_lost_error(self, members: Sequence[int], during: str) -> DistError | None:
        """See Communicator."""
        try:
            self.state.raise_if_peer_lost([self.ranks[member] for member in members], during)
        except DistError as error:
            return error
        return None

    def start(self, hosts: Sequence[Hashable], options: SegmentOptions, timeout: float) -> None:
        """Wait for the other members, and choose the backend; a collective call.

        Args:
            hosts: equal for members that see the same shared memory, by group rank.
            options: how this member shares memory.
            timeout: seconds to wait for the others.

        Raises:
            CollectiveMismatchError: the members do not make the same group.
            DistBackendError: a member is missing, or failed.
        """
        self._segment_options = options
        if self.size == 1:
            return
        layout = layout_of(hosts)
        created: list[Segment | None] = []
        self.set_up(lambda link: created.append(create_segment(link, layout, options)), timeout)
        (segment,) = created
        if segment is None:
            return
        if len(layout) > 1:
            self.use_backend(HierarchicalCpuBackend(self.link, HierarchicalLink(self.link, segment, layout)))
        elif options.delegated:
            self.use_backend(DelegatedBackend(segment))
        else:
            self.use_backend(CpuBackend(self.link, segment))
            self.set_up(lambda shared: shared.windows.probe_reads(), timeout)

    def empty(self, dtype: np.dtype[Any], count: int, options: Options) -> Array:
        """See Communicator."""
        if not self.queue.backend.allocates:
            return np.empty(count, dtype)
        return self._registered_array(dtype, count, options, self._segment_options.directory, self._segment_options.job)

    def monitored_barrier(self, options: Options) -> None:
        """See Communicator."""
        subject = self.queue.backend.monitored_subject
        self.queue.submit((OpType.BARRIER, None, 0, None, None, None, subject), (), options)

    # Point-to-point

    def send(self, array: Array, rank: int, tag: int, options: Options) -> Work | None:
        """See Communicator."""
        return self._transfer("send", array, rank, tag, options)[0]

    def receive(self, array: Array, rank: int, tag: int, options: Options) -> Work | int:
        """See Communicator."""
        work, transfer = self._transfer("recv", array, rank, tag, options)
        return self.state.global_rank(transfer.source) if work is None else work

    def begin_send(self, array: Array, rank: int, tag: int, options: Options) -> PendingMessage:
        """Begin to send ``array`` to a rank; the caller completes the message, or abandons it."""
        return self._pending("send", array, rank, tag, self._begin("send", array, rank, tag, options), options)

    def begin_receive(self, array: Array, rank: int, tag: int, options: Options) -> PendingMessage:
        """Begin to receive into ``array`` from a rank, or from ANY; see begin_send."""
        return self._pending("recv", array, rank, tag, self._begin("recv", array, rank, tag, options), options)

    def source(self, message: PendingMessage) -> int:
        """Return the global rank of a received message's sender."""
        return self.state.global_rank(message.transfer.source)

    def _transfer(
        self, op: str, array: Array, rank: int, tag: int, options: Options
    ) -> tuple[MessageWork | None, Transfer]:
        """Complete a message, or return the Work of an asynchronous one."""
        started = time.monotonic()
        transfer = self._begin(op, array, rank, tag, options)
        if not transfer.done or options.async_op:
            message = self._pending(op, array, rank, tag, transfer, options)
            if options.async_op:
                source = (lambda: self.source(message)) if op == "recv" else None
                work = MessageWork(message.complete, options.result, message.deadline, source, message.abandon)
                return work, transfer
            message.complete(message.deadline)
            return None, transfer
        # Carried at once, as most short messages are: without a PendingMessage.
        what = op, array.dtype, array.size, rank, tag
        self._messages.record((self.state, what, 0, started, None, "", array.nbytes), transfer.error)
        if transfer.error is not None:
            raise transfer.error
        if options.on_complete is not None:
            options.on_complete()
        return None, transfer

    def _begin(self, op: str, array: Array, rank: int, tag: int, options: Options) -> Transfer:
        if self.state.failure is not None:
            self.state.raise_if_failed()
        with self.engine.foreground():
            begin = self._transport.send if op == "send" else self._transport.receive
            transfer = begin(rank, as_bytes(array), code_of(array.dtype), tag)
            if options.async_op and not transfer.done:
                self._transport.progress_in_background(transfer)
        return transfer

    def _pending(
        self, op: str, array: Array, rank: int, tag: int, transfer: Transfer, options: Options
    ) -> PendingMessage:
        deadline = Deadline(options.timeout)
        what = op, array.dtype, array.size, rank, tag
        partners = self._sources if rank == ANY else (rank,)
        record: Record = self.state, what, 0, deadline.started, None, "", array.nbytes
        return PendingMessage(
            self.state, self._transport, transfer, record, self._messages, partners, deadline, options.on_complete
        )

    # Introspection

    def in_flight(self) -> list[InFlight]:
        """Return the calls and messages that have not ended."""
        now = time.monotonic()
        return [in_flight(record, now) for record in self.active_records()]

    def active_records(self) -> list[Record]:
        """See Communicator."""
        return super().active_records() + self.delegated_calls.active_records() + self._messages.active_records()

    def matches(self, name: str) -> bool:
        """See RecordedGroup."""
        return self.state.matches(name)

    def op_stats(self) -> Mapping[str, OpStats]:
        """See Communicator."""
        found = {**super().op_stats(), **self._messages.op_stats()}
        for op, stats in self.delegated_calls.op_stats().items():
            total = OpStats()
            total.add(stats)
            if op in found:
                total.add(found[op])
            found[op] = total
        return found

    def close(self) -> None:
        """See Communicator."""
        if self._closed:
            return
        self._closed = True
        self.state.broadcast_abort()
        self.queue.backend.leave()
        with self.engine.lock:
            self.state.mark_destroyed()
            unread = list(self.matcher.refusals.values())
        for refusal in unread:
            _log.warning("group %r has ended, and a message was lost before: %s", self.name, refusal.message)
        self.engine.unregister_sink(self.id)
        self.queue.close()
        self.recorder.remove_group(self)

    # FrameSink: with the engine's lock held

    def buffer_for(self, rank: int, header: Header) -> memoryview | None:
        """See FrameSink."""
        if header.opcode is _PART:
            return self.link.buffer_for(rank, header)
        return self.matcher.buffer_for(rank, header)

    def on_peer_lost(self, rank: int) -> None:
        """See FrameSink."""
        self.state.on_peer_lost(rank)
        self.queue.backend.on_peer_lost()

    def on_frame(self, rank: int, header: Header, payload: memoryview | bytes) -> None:
        """See FrameSink."""
        opcode = header.opcode
        if rank not in self._others:
            return
        if opcode is _ENTER or opcode is _PART:
            self.link.on_frame(rank, header, payload)
        elif opcode is _ABORT:
            self.state.on_abort(bytes(payload))
        else:
            self.matcher.on_frame(rank, header, payload)
