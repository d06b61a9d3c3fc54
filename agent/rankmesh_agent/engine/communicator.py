"""A group at one rank: its collectives, its messages, and what others ask about it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from rankmesh_agent.collectives.hierarchical.hosts import Hosts, layout_of
from rankmesh_agent.collectives.link import octets
from rankmesh_agent.engine.backends.custom import CustomBackend
from rankmesh_agent.engine.backends.hosts import HostsBackend
from rankmesh_agent.engine.backends.mesh import MeshBackend
from rankmesh_agent.engine.backends.sharing import Sharing, share_memory
from rankmesh_agent.engine.batch import merged
from rankmesh_agent.engine.mesh import Mesh
from rankmesh_agent.engine.messages import Messages
from rankmesh_agent.engine.order import Options, Order
from rankmesh_agent.engine.p2p import ANY, Matching
from rankmesh_agent.engine.peer import Port, Transfer
from rankmesh_agent.engine.records import Entry, Tally, in_flight
from rankmesh_agent.engine.registered import Outcome
from rankmesh_agent.engine.rounds import MessageLink
from rankmesh_agent.engine.standing import Standing
from rankmesh_agent.engine.waits import Message
from rankmesh_agent.engine.work import MessageWork, Work
from rankmesh_agent.transports.segment import Segment
from rankmesh_agent.wire.deadline import Deadline
from rankmesh_agent.wire.dtypes import code_of
from rankmesh_agent.wire.errors import DistError, DistNetworkError
from rankmesh_agent.wire.frames import Header, Opcode
from rankmesh_agent.wire.ops import Call, Kind, ReduceOp
from rankmesh_agent.wire.schemas import MOST_IN_FLIGHT, GroupInfo, InFlight, Member

Array = np.ndarray[Any, Any]
_log = logging.getLogger("rankmesh")
# Read off their classes once: Python 3.11 takes 0.1 µs each time, much in a call of a few.
_ALL_REDUCE, _ALL_GATHER, _REDUCE_SCATTER, _BARRIER = (
    Kind.ALL_REDUCE,
    Kind.ALL_GATHER,
    Kind.REDUCE_SCATTER,
    Kind.BARRIER,
)
_ENTER, _PART, _ABORT = Opcode.ENTER, Opcode.PART, Opcode.ABORT


class Communicator(Port):
    """One rank's side of a group.

    Args:
        mesh: the process's connections.
        group: id of the group, equal at all members.
        name: name for people.
        ranks: global ranks of the members, by group rank; this process is one.
        members: who the ranks are, by global rank, for error messages.
        timeout: default seconds a call may take.

    Attributes:
        numbers: the numbers the user knows the members by, by group rank: ``ranks``, unless the user's world is no
            longer the mesh.
        usual: how a synchronous call is to be made that asks for nothing in particular.
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
        self._sources = tuple(member for member in self.ranks if member != mesh.rank)
        self.timeout = timeout
        self.usual = Options(timeout)
        self._standing = Standing(mesh, group, name, self.ranks, members)
        self._link = MessageLink(mesh, group, self.ranks, self.rank)
        self._matching = Matching(mesh, group, self._standing.number)
        self._messages = Messages(mesh.recorder)
        self._order = Order(self._standing, name, MeshBackend(self._link, self.ranks, None))
        self._closed = False
        mesh.recorder.begin(self)
        mesh.open_port(group, self)

    @property
    def failure(self) -> DistError | None:
        """The first failure, None while the group can go on."""
        return self._standing.failure

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers the user knows the members by, by group rank: ``ranks``, unless the world has shrunk."""
        return self._standing.numbers

    @numbers.setter
    def numbers(self, numbers: tuple[int, ...]) -> None:
        self._standing.numbers = numbers

    @property
    def medium(self) -> str:
        """What carries the collectives: ``shm``, ``tcp``, ``shm+tcp`` (several hosts) or ``self``."""
        return self._order.backend.medium

    @property
    def backend(self) -> str:
        """The name of what carries out the collectives."""
        return self._order.backend.name

    def use_engine(self, name: str, engine: Any) -> None:
        """Have an engine from outside carry out the collectives from now on; the members do so at the same point.

        Args:
            name: what get_backend() says.
            engine: see backends.custom.CustomBackend.
        """
        self._order.use(CustomBackend(name, engine, self._link, self.ranks))

    def abort(self, error: BaseException) -> None:
        """End the group at all members because of an error here."""
        self._standing.give_up(error)

    def start(self, hosts: Sequence[Hashable], sharing: Sharing, timeout: float) -> None:
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
        call = Call(Kind.NEW_GROUP, subject=f"ranks={list(self.ranks)}")
        layout = layout_of(hosts)
        segment: Segment | None = None

        def share_it(link: MessageLink) -> None:
            nonlocal segment
            segment = share_memory(link, layout, sharing)

        order = self._order
        order.carry_out(order.plan(call, share_it), (), 0, Options(timeout))
        if segment is not None and len(layout) > 1:
            order.use(HostsBackend(self._link, self.ranks, Hosts(self._link, segment, layout)))
            return
        order.use(MeshBackend(self._link, self.ranks, segment))
        if segment is not None:
            order.carry_out(order.plan(call, lambda shared: shared.windows.probe()), (), 0, Options(timeout))

    # Collectives: arrays are one-dimensional, contiguous and of a supported dtype; roots are group ranks

    def all_reduce(self, array: Array, op: ReduceOp, options: Options) -> Work | None:
        """Reduce ``array`` over all members, in place."""
        return self._order.submit((_ALL_REDUCE, array.dtype, array.size, op), (array, op), options)

    def reduce(self, array: Array, op: ReduceOp, root: int, options: Options) -> Work | None:
        """Reduce ``array`` over all members, into the root's."""
        key = Kind.REDUCE, array.dtype, array.size, op, self.numbers[root]
        return self._order.submit(key, (array, op, root), options)

    def broadcast(self, array: Array, root: int, options: Options) -> Work | None:
        """Copy the root's array to all members."""
        key = Kind.BROADCAST, array.dtype, array.size, None, self.numbers[root]
        return self._order.submit(key, (array, root), options)

    def all_gather(self, outputs: Sequence[Array], array: Array, options: Options) -> Work | None:
        """Copy every member's ``array`` to the output of its group rank; they may differ in length."""
        count, counts = _counts(outputs)
        key = _ALL_GATHER, array.dtype, count, None, None, counts
        return self._order.submit(key, (outputs, array), options)

    def gather(self, outputs: Sequence[Array], array: Array, root: int, options: Options) -> Work | None:
        """Copy every member's ``array`` to the root's output of its group rank; no outputs elsewhere."""
        key = Kind.GATHER, array.dtype, array.size, None, self.numbers[root]
        return self._order.submit(key, (outputs, array, root), options)

    def scatter(self, output: Array, inputs: Sequence[Array], root: int, options: Options) -> Work | None:
        """Copy the root's input of each group rank to that member's ``output``; no inputs elsewhere."""
        key = Kind.SCATTER, output.dtype, output.size, None, self.numbers[root]
        return self._order.submit(key, (output, inputs, root), options)

    def reduce_scatter(self, output: Array, inputs: Sequence[Array], op: ReduceOp, options: Options) -> Work | None:
        """Reduce every member's input of each group rank into that member's ``output``; they may differ in length."""
        count, counts = _counts(inputs)
        key = _REDUCE_SCATTER, output.dtype, count, op, None, counts
        return self._order.submit(key, (output, inputs, op), options)

    def all_to_all(self, outputs: Sequence[Array], inputs: Sequence[Array], options: Options) -> Work | None:
        """Copy every member's input of each group rank to that member's output of its own; each of its own length."""
        return self._order.submit((Kind.ALL_TO_ALL, inputs[0].dtype, -1), (outputs, inputs), options)

    def barrier(self, options: Options) -> Work | None:
        """Wait until all members have come."""
        return self._order.submit((_BARRIER,), (), options)

    def empty(self, dtype: np.dtype[Any], count: int, options: Options) -> Array:
        """Return an array in memory that the members share, where they share memory; a synchronous collective call.

        Raises:
            DistNetworkError: there is no room, or a member cannot map it; the same at all members.
        """
        if not isinstance(self._order.backend, MeshBackend):
            return np.empty(count, dtype)  # an engine from outside knows nothing of ours
        outcome: Outcome = []
        arguments = self._sharing.directory, self._sharing.job, count * dtype.itemsize, outcome
        order = self._order
        order.submit((Kind.EMPTY, dtype, count), arguments, options._replace(after=lambda: order.use(order.backend)))
        made = outcome[0]
        if isinstance(made, DistNetworkError):
            raise made
        return made.view(dtype)

    def open_batch(self) -> None:
        """Record this thread's collectives instead of making them.

        Raises:
            RuntimeError: a batch is open.
        """
        self._order.open_batch()

    @property
    def batching(self) -> bool:
        """Whether this thread's collectives are being recorded."""
        return self._order.batching

    def close_batch(self, options: Options | None) -> list[Work]:
        """Make the recorded collectives, or with None forget them; return the Works of asynchronous ones."""
        recorded = self._order.close_batch()
        if options is None:
            return []
        works = []
        for call in merged(recorded):
            how = options._replace(user=call.user, after=call.after, note=call.note)
            works.append(self._order.submit(call.key, call.arguments, how))
        return [work for work in works if work is not None]

    # Point-to-point: ranks are the mesh's

    def send(self, array: Array, rank: int, tag: int, options: Options) -> Work | None:
        """Send ``array`` to a rank."""
        self._standing.raise_if_failed()
        with self.mesh.visit():
            transfer = self._matching.send(rank, octets(array), code_of(array.dtype), tag)
            if options.async_op and not transfer.done:
                self.mesh.hold(self.id, transfer)
        message = self._message(transfer, "send", array, rank, tag, (rank,), options)
        return self._follow_up(message, options, None)

    def receive(self, array: Array, rank: int, tag: int, options: Options) -> Work | int:
        """Receive into ``array`` from a rank, or from ANY; return the source's number, or the Work."""
        self._standing.raise_if_failed()
        with self.mesh.visit():
            transfer = self._matching.receive(rank, octets(array), code_of(array.dtype), tag)
            if options.async_op and not transfer.done:
                self.mesh.hold(self.id, transfer)
        message = self._message(transfer, "recv", array, rank, tag, self._sources if rank == ANY else (rank,), options)
        work = self._follow_up(message, options, lambda: self._number(transfer.source))
        return self._number(transfer.source) if work is None else work

    def _message(
        self,
        transfer: Transfer,
        op: str,
        array: Array,
        rank: int,
        tag: int,
        partners: Sequence[int],
        options: Options,
    ) -> Message:
        deadline, standing = Deadline(options.timeout), self._standing
        what = op, array.dtype, array.size, rank, tag
        entry: Entry = standing, what, 0, deadline.begun, None, "", array.nbytes
        return Message(standing, self._matching, transfer, entry, self._messages, partners, deadline, options.after)

    def _follow_up(self, message: Message, options: Options, source: Callable[[], int] | None) -> Work | None:
        if not options.async_op:
            message.settle(message.deadline)
            return None
        return MessageWork(message.settle, options.user, message.deadline, source)

    def _number(self, rank: int) -> int:
        return self._standing.number(rank)

    # What others ask

    def info(self) -> GroupInfo:
        """Return the group as this member sees it."""
        standing = self._standing
        last = standing.call.name if standing.call is not None else ""
        failure = standing.failure.message if standing.failure is not None else ""
        nbytes = sum(tally.nbytes for tally in self.tallies().values())
        inflight = self.in_flight()[:MOST_IN_FLIGHT]
        ranks = list(self.ranks)
        return GroupInfo(standing.id, self.name, ranks, standing.seq, self.medium, last, failure, nbytes, inflight)

    def in_flight(self) -> list[InFlight]:
        """Return the calls and messages that have begun, or are queued, and not ended: see GroupInfo."""
        now = time.monotonic()
        return [in_flight(entry, now) for entry in self.under_way()]

    def under_way(self) -> list[Entry]:
        """See records.Recorded."""
        return self._order.under_way() + self._messages.under_way()

    def tallies(self) -> Mapping[str, Tally]:
        """See records.Recorded."""
        return {**self._order.tallies(), **self._messages.tallies()}

    def close(self) -> None:
        """End the group at this member: queued calls fail, the worker ends. Does nothing the second time."""
        if self._closed:
            return
        self._closed = True
        with self.mesh.lock:
            self._standing.destroyed()
            unread = list(self._matching.refusals.values())
        for refusal in unread:
            _log.warning("group %r has ended, and a message was lost before: %s", self.name, refusal.message)
        self.mesh.close_port(self.id)
        self._order.close()
        self.mesh.recorder.end(self)

    # Port: with the mesh's lock held

    def place(self, rank: int, header: Header) -> memoryview | None:
        """See Port."""
        if header.opcode is _PART:
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
        if opcode is _ENTER or opcode is _PART:
            self._link.deliver(rank, header, payload)
        elif opcode is _ABORT:
            self._standing.told(bytes(payload))
        else:
            self._matching.deliver(rank, header, payload)


def _counts(arrays: Sequence[Array]) -> tuple[int, tuple[int, ...] | None]:
    """Return the length of the arrays, and their lengths if they differ."""
    first = arrays[0].size
    for array in arrays:
        if array.size != first:
            return -1, tuple(array.size for array in arrays)
    return first, None
