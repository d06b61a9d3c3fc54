"""A group at one rank: its collectives, its messages, and what others ask about it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rankmesh_agent.backends.base import MONITORED
from rankmesh_agent.backends.cpu import CpuBackend
from rankmesh_agent.backends.custom import CustomBackend
from rankmesh_agent.backends.delegated import DelegatedBackend
from rankmesh_agent.backends.hierarchical_cpu import HierarchicalCpuBackend
from rankmesh_agent.backends.segment_setup import SegmentOptions, create_segment
from rankmesh_agent.collectives.hierarchical.hosts import HierarchicalLink, layout_of
from rankmesh_agent.collectives.link import as_bytes
from rankmesh_agent.group.call_queue import CallQueue, Options
from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.group.delegation import DelegatedCalls
from rankmesh_agent.group.flight_recorder import FlightRecorder, OpStats, Record, in_flight
from rankmesh_agent.group.message_stats import MessageLog
from rankmesh_agent.group.pending import LocalActiveCall, MessageTransport, PendingMessage
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
from rankmesh_agent.wire.ops import Call, OpType
from rankmesh_agent.wire.schemas import MOST_IN_FLIGHT, GroupInfo, InFlight, Member

if TYPE_CHECKING:
    from rankmesh_agent.mpi.group import MpiGroup

Array = np.ndarray[Any, Any]
_log = logging.getLogger("rankmesh")
# Read off their class once: Python 3.11 takes 0.1 µs each time, much in a call of a few.
_ENTER, _PART, _ABORT = Opcode.ENTER, Opcode.PART, Opcode.ABORT


class LocalCommunicator(Communicator, FrameSink):
    """One rank's side of a group.

    Args:
        mesh: the process's connections.
        group: id of the group, equal at all members.
        name: name for people.
        ranks: global ranks of the members, by group rank; this process is one.
        members: who the ranks are, by global rank, for error messages.
        timeout: default seconds a call may take.
        recorder: records the calls; one of its own by default.

    Attributes:
        mesh: see above.
        recorder: see above.
        elsewhere: the calls that another process makes in this rank's place, if one does.
        lent: the members' memory, if it was lent to such a process; see Sharing.lend.
    """

    def __init__(
        self,
        mesh: ProgressEngine,
        group: int,
        name: str,
        ranks: Sequence[int],
        members: dict[int, Member],
        timeout: float,
        recorder: FlightRecorder | None = None,
    ) -> None:
        super().__init__(group, name, ranks, mesh.rank, timeout)
        self.mesh = mesh
        self.recorder = recorder = FlightRecorder() if recorder is None else recorder
        self._others = frozenset(self.ranks) - {mesh.rank}
        self._sources = tuple(member for member in self.ranks if member != mesh.rank)
        self._standing = LocalGroupState(mesh, group, name, self.ranks, members, recorder)
        self._link = MessageLink(mesh, group, self.ranks, self.rank)
        self._matching = MessageMatcher(mesh, group, self._standing.global_rank)
        self._carrier: MessageTransport = self._matching
        self._mpi: MpiGroup | None = None
        self._messages = MessageLog(recorder)
        self._running = LocalActiveCall(self._standing)
        self._queue = CallQueue(self._standing, self._running, name, CpuBackend(self._link, self.ranks, None))
        self._submit = self._queue.submit
        self.lent: Segment | None = None
        self.delegated_calls = DelegatedCalls(self._standing, self._link)
        self._closed = False
        recorder.add_group(self)
        mesh.register_sink(group, self)

    @property
    def failure(self) -> DistError | None:
        """The first failure, None while the group can go on."""
        return self._standing.failure

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """The numbers the user knows the members by, by group rank: ``ranks``, unless the world has shrunk."""
        return self._standing.global_ranks

    @global_ranks.setter
    def global_ranks(self, global_ranks: tuple[int, ...]) -> None:
        self._standing.global_ranks = global_ranks

    def use_custom_backend(self, name: str, engine: Any) -> None:
        """Have an engine from outside carry out the collectives from now on; the members do so at the same point.

        Args:
            name: what get_backend() says.
            engine: see backends.custom.CustomBackend.
        """
        self._queue.use_backend(CustomBackend(name, engine, self._link, self.ranks))

    def use_mpi(self, compares: bool) -> None:
        """See Calls."""
        # Only here: of all jobs, few run on MPI.
        from rankmesh_agent.mpi.communicator import MpiCommunicator, create_communicator
        from rankmesh_agent.mpi.group import MpiGroup

        order, standing = self._queue, self._standing
        found: list[MpiCommunicator] = []
        # A call with a number of its own: what the members told each other in the first one may still be on its way.
        order.use_backend(CpuBackend(self._link, self.ranks, None))
        call = Call(OpType.NEW_GROUP, subject=f"ranks={list(self.ranks)} over MPI")
        how = order.plan(call, lambda link: found.append(create_communicator(link, self.id, compares)))
        order.execute(how, (), standing.seq + 1, self.default_options)
        self._mpi = MpiGroup(found[0], standing, self._running, self._link, self._matching)
        self._carrier = self._mpi.messages
        order.use_backend(self._mpi.backend)

    def abort(self, error: BaseException) -> None:
        """End the group at all members because of an error here."""
        self._standing.abort(error)

    def peer_lost_error(self, members: Sequence[int], during: str) -> DistError | None:
        """See Calls."""
        try:
            self._standing.raise_if_peer_lost([self.ranks[member] for member in members], during)
        except DistError as error:
            return error
        return None

    def start(self, hosts: Sequence[Hashable], sharing: SegmentOptions, timeout: float) -> None:
        """Meet the other members and set up what the calls run over; a collective call.

        Args:
            hosts: what is equal for members that see the same shared memory, by group rank.
            sharing: how this member would share memory.
            timeout: seconds to wait for the others.

        Raises:
            CollectiveMismatchError: the members do not make the same group.
            DistBackendError: a member is missing, or failed.
        """
        self._sharing = sharing
        if self.size == 1:
            return
        call = Call(OpType.NEW_GROUP, subject=f"ranks={list(self.ranks)}")
        layout = layout_of(hosts)
        segment: Segment | None = None

        def share_it(link: MessageLink) -> None:
            nonlocal segment
            segment = create_segment(link, layout, sharing)

        order = self._queue
        order.execute(order.plan(call, share_it), (), 0, Options(timeout))
        if segment is not None and len(layout) > 1:
            order.use_backend(
                HierarchicalCpuBackend(self._link, self.ranks, HierarchicalLink(self._link, segment, layout))
            )
            return
        if segment is not None and sharing.delegated:
            self.lent = segment
            order.use_backend(DelegatedBackend())
            return
        order.use_backend(CpuBackend(self._link, self.ranks, segment))
        if segment is not None:
            order.execute(order.plan(call, lambda shared: shared.windows.probe_reads()), (), 0, Options(timeout))

    def empty(self, dtype: np.dtype[Any], count: int, options: Options) -> Array:
        """Return an array in memory that the members share, where they share memory; a synchronous collective call.

        Raises:
            DistNetworkError: there is no room, or a member cannot map it; the same at all members.
        """
        if not isinstance(self._queue.backend, CpuBackend):
            return np.empty(count, dtype)  # an engine from outside knows nothing of ours
        return self._registered_array(dtype, count, options, self._sharing.directory, self._sharing.job)

    def monitored_barrier(self, options: Options) -> None:
        """See Calls."""
        subject = MONITORED if self._mpi is not None else ""
        self._queue.submit((OpType.BARRIER, None, 0, None, None, None, subject), (), options)

    # Point-to-point: ranks are the mesh's

    def send(self, array: Array, rank: int, tag: int, options: Options) -> Work | None:
        """See Calls."""
        return self._follow_up(self.begin_send(array, rank, tag, options), options, None)

    def receive(self, array: Array, rank: int, tag: int, options: Options) -> Work | int:
        """See Calls."""
        message = self.begin_receive(array, rank, tag, options)
        work = self._follow_up(message, options, lambda: self.source(message))
        return self.source(message) if work is None else work

    def begin_send(self, array: Array, rank: int, tag: int, options: Options) -> PendingMessage:
        """Begin to send ``array`` to a rank; whoever calls this has to settle it, or abandon it."""
        self._standing.raise_if_failed()
        with self.mesh.foreground():
            transfer = self._carrier.send(rank, as_bytes(array), code_of(array.dtype), tag)
            if options.async_op and not transfer.done:
                self._carrier.progress_in_background(transfer)
        return self._message(transfer, "send", array, rank, tag, (rank,), options)

    def begin_receive(self, array: Array, rank: int, tag: int, options: Options) -> PendingMessage:
        """Begin to receive into ``array`` from a rank, or from ANY; see begin_send."""
        self._standing.raise_if_failed()
        with self.mesh.foreground():
            transfer = self._carrier.receive(rank, as_bytes(array), code_of(array.dtype), tag)
            if options.async_op and not transfer.done:
                self._carrier.progress_in_background(transfer)
        return self._message(transfer, "recv", array, rank, tag, self._sources if rank == ANY else (rank,), options)

    def source(self, message: PendingMessage) -> int:
        """Return the number of the rank that a received message came from."""
        return self._number(message.transfer.source)

    def _message(
        self,
        transfer: Transfer,
        op: str,
        array: Array,
        rank: int,
        tag: int,
        partners: Sequence[int],
        options: Options,
    ) -> PendingMessage:
        deadline, standing = Deadline(options.timeout), self._standing
        what = op, array.dtype, array.size, rank, tag
        entry: Record = standing, what, 0, deadline.started, None, "", array.nbytes
        return PendingMessage(
            standing, self._carrier, transfer, entry, self._messages, partners, deadline, options.on_complete
        )

    def _follow_up(self, message: PendingMessage, options: Options, source: Callable[[], int] | None) -> Work | None:
        if not options.async_op:
            message.complete(message.deadline)
            return None
        return MessageWork(message.complete, options.result, message.deadline, source, message.abandon)

    def _number(self, rank: int) -> int:
        return self._standing.global_rank(rank)

    # What others ask

    def info(self) -> GroupInfo:
        """Return the group as this member sees it."""
        standing = self._standing
        last = standing.call.name if standing.call is not None else ""
        failure = standing.failure.message if standing.failure is not None else ""
        nbytes = sum(tally.nbytes for tally in self.op_stats().values())
        inflight = self.in_flight()[:MOST_IN_FLIGHT]
        ranks = list(self.ranks)
        return GroupInfo(standing.id, self.name, ranks, standing.seq, self.medium, last, failure, nbytes, inflight)

    def in_flight(self) -> list[InFlight]:
        """Return the calls and messages that have begun, or are queued, and not ended: see GroupInfo."""
        now = time.monotonic()
        return [in_flight(entry, now) for entry in self.active_records()]

    def active_records(self) -> list[Record]:
        """See records.Recorded."""
        return self._queue.active_records() + self.delegated_calls.active_records() + self._messages.active_records()

    def matches(self, name: str) -> bool:
        """See records.Recorded."""
        return self._standing.matches(name)

    def op_stats(self) -> Mapping[str, OpStats]:
        """See records.Recorded."""
        found = {**self._queue.op_stats(), **self._messages.op_stats()}
        for op, tally in self.delegated_calls.op_stats().items():
            both = OpStats()
            both.add(tally)
            if op in found:
                both.add(found[op])
            found[op] = both
        return found

    def close(self) -> None:
        """End the group at this member: queued calls fail, the worker ends. Does nothing the second time."""
        if self._closed:
            return
        self._closed = True
        self._standing.broadcast_abort()
        if self._mpi is not None:
            self._mpi.close()
        with self.mesh.lock:
            self._standing.mark_destroyed()
            unread = list(self._matching.refusals.values())
        for refusal in unread:
            _log.warning("group %r has ended, and a message was lost before: %s", self.name, refusal.message)
        self.mesh.unregister_sink(self.id)
        self._queue.close()
        self.recorder.remove_group(self)

    # FrameSink: with the engine's lock held

    def buffer_for(self, rank: int, header: Header) -> memoryview | None:
        """See FrameSink."""
        if header.opcode is _PART:
            return self._link.buffer_for(rank, header)
        return self._matching.buffer_for(rank, header)

    def on_peer_lost(self, rank: int) -> None:
        """See FrameSink."""
        self._standing.on_peer_lost(rank)
        if self._mpi is not None:
            self._mpi.lost()

    def on_frame(self, rank: int, header: Header, payload: memoryview | bytes) -> None:
        """See FrameSink."""
        opcode = header.opcode
        if rank not in self._others:
            return
        if opcode is _ENTER or opcode is _PART:
            self._link.on_frame(rank, header, payload)
        elif opcode is _ABORT:
            self._standing.on_abort(bytes(payload))
        else:
            self._matching.on_frame(rank, header, payload)
