"""The Link of a group without shared memory: arrivals at a call, and frames for posted buffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from time import monotonic
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rankmesh_agent.collectives.link import FEW_RANKS, DirectLink
from rankmesh_agent.collectives.rounds import allreduce_bytes_by_tree, distances
from rankmesh_agent.progress.engine import ProgressEngine
from rankmesh_agent.progress.framing import Transfer
from rankmesh_agent.progress.posted_parts import PostedParts
from rankmesh_agent.progress.status import DIFFERENT, CallTable
from rankmesh_agent.shared_memory.slots import CallMismatchError
from rankmesh_agent.wire import frames
from rankmesh_agent.wire.errors import ProtocolError
from rankmesh_agent.wire.frames import Header, Opcode


class Wait(Protocol):
    """Waits for messages; see backends.base.CallContext.wait."""

    def __call__(
        self, ready: Callable[[], bool], missing: Callable[[], list[int]], idle: Callable[[], object] | None = None, /
    ) -> None:
        """Move messages until ``ready()``."""


Payload = memoryview | bytes
_ENTER = Opcode.ENTER  # read off its class once, see communicator


_DESCRIPTIONS = 0xFFFFFFFF
"""The part of an ENTER with descriptions in the first round; that of the next round is one less."""
_STATUS = 0xFFFFFF00
"""The part of an ENTER that reports calls, see CallTable; no rank waits for it."""
_LAUNCHES = 0xFFFFFF01
"""The same of the calls that run on GPUs."""
_MAX_TEXT = 200
DIRECT_RANKS = 3
"""Most ranks in a group that arrive by messages between all of them: one step, but size (size - 1) messages."""
_CONNECT_SECONDS = 0.1
"""Seconds of a wait after which this rank connects to those that it waits for: it then notices their end at once."""
_MAX_CONNECTED = 8
_MAX_STEPS_AHEAD = 256
"""Steps for which arrivals are kept, of this call and later ones: more than a peer that makes the calls is ahead."""
_STAR_RANKS = 12
"""The same by way of rank 0: two steps and 2 (size - 1) messages, the fewest, which count where ranks share cores."""


class MessageLink(DirectLink):
    """The messages of a group during its calls: arrivals of the ranks verify that all of them make the same one.

    Each method that waits for arrivals raises CallMismatchError if the ranks have made different calls.

    Attributes:
        launches: the same of the calls that run on GPUs, at which a rank does not wait for the others.
        describe: returns the call under way in words.
        departed: the global ranks that have left the group.
    """

    def __init__(self, engine: ProgressEngine, group: int, ranks: Sequence[int], rank: int) -> None:
        self.rank = rank
        self.size = len(ranks)
        self._engine = engine
        self._group = group
        self._ranks = tuple(ranks)
        self._others = self.others()
        self._group_rank = {member: number for number, member in enumerate(ranks)}
        # No rank ends a call before all have begun it, so peers are at most one call ahead.
        self._arrived: dict[tuple[int, int], dict[int, tuple[int, Payload]]] = {}
        self.calls = CallTable(group, rank, self.size, partial(self._send_arrival, _STATUS))
        self.launches = CallTable(group, rank, self.size, partial(self._send_arrival, _LAUNCHES))
        self.describe: Callable[[], str] = str
        self._sources: list[int] = []
        """The ranks from which messages of this call's rounds have come."""
        self._parts = PostedParts()
        self._seq = -1
        self._mismatched = -2
        """The latest call in which other ranks found a mismatch."""
        self._round = 0
        self._begun: list[tuple[int, Transfer]] | None = None
        """The sends of an ``all_exchange`` that the compiled core has begun."""
        self._complete = False
        """Whether all ranks are known to have arrived at the call."""
        self._report_at = 0.0
        self._fingerprint = 0
        self._wait: Wait = _outside_call
        self._next_sources: list[int] | None = None
        """The ranks whose messages the next wait is for; None: all that are missing."""
        self._scratch = np.empty(0, np.uint8)
        self.departed: Collection[int] = ()

    def begin(self, seq: int, fingerprint: int, wait: Wait) -> None:
        """Begin call number ``seq``, the same at all ranks; ``arrive`` compares the fingerprints of all ranks."""
        with self._engine.lock:
            self._fingerprint = fingerprint
            self._wait = partial(self._wait_and_connect, wait) if self._engine.on_demand else wait
            if seq == self._seq:
                return
            for part in range(self._round):
                self._arrived.pop((self._seq, part), None)  # arrivals received after the end of the previous call
            self._seq = seq
            self._round = 0
            self._sources.clear()
            self._complete = False
            calls = self.calls
            calls.oldest = seq
            self._report_at = monotonic() + calls.seconds
            if calls.latest >= seq and calls.differs(seq, fingerprint):
                self._mismatched = seq

    def arrive(self) -> None:
        """Arrive; see Link.arrive."""
        if self.size <= DIRECT_RANKS:
            self.all_exchange()
            return
        if self.size <= _STAR_RANKS:
            self.via_root(0, b"", lambda _: b"")
            return
        rank, size = self.rank, self.size
        if self.shares_cores:
            allreduce_bytes_by_tree(self, b"", lambda lower, upper: lower)
            self._complete = True
            return
        for distance in distances(size):
            self.step((rank + distance) % size, b"", (rank - distance) % size)
        self._complete = True

    def all_exchange(self, payload: Payload = b"", each: Sequence[Payload] | None = None) -> list[Payload]:
        """Arrive; see Link.all_exchange."""
        part, self._round = self._round, self._round + 1
        with self._engine.lock:
            arrivals = self._arrived.setdefault((self._seq, part), {})
            own = payload if each is None else each[self.rank]
            header = self._header(part, len(own))
            begun, self._begun = self._begun, None
            if begun is not None:
                pending_sends = begun
            elif each is None:
                pending_sends = self._send(self._others, header, payload)
            else:
                pending_sends = self._send_each(part, each)
            if not pending_sends:
                self._take(self._others, header, len(own), arrivals)
        if pending_sends or len(arrivals) < len(self._others):
            self._wait_for_all(arrivals, pending_sends)
        arrived = self._arrived.pop((self._seq, part))
        arrived[self.rank] = self._fingerprint, own
        self._compare(arrived)
        self._complete = True
        return [arrived[member][1] for member in range(self.size)]

    def resume(self, pending_sends: list[tuple[int, Transfer]]) -> None:
        """Have the next ``all_exchange`` go on with one that the compiled core has begun."""
        with self._engine.lock:
            self._begun = pending_sends
            for member, _ in pending_sends:
                self._engine.resume_send(self._ranks[member])

    def arrive_with(
        self, sends: Sequence[tuple[int, memoryview]], receives: Sequence[tuple[int, memoryview]]
    ) -> list[tuple[int, Transfer]]:
        """Arrive with the first messages of the call; see Link.arrive_with."""
        part, self._round = self._round, self._round + 1
        with self._engine.lock:
            arrivals = self._arrived.setdefault((self._seq, part), {})
            exchange = self.start(sends, receives, self._header(part, 0))
        self._wait_for_all(arrivals, [])
        self._compare({self.rank: (self._fingerprint, b""), **self._arrived.pop((self._seq, part))})
        self._complete = True
        return exchange

    def _wait_for_all(self, arrivals: Collection[int], pending_sends: list[tuple[int, Transfer]]) -> None:
        expected = len(self._others)

        def missing() -> list[int]:
            unsent = {member for member, transfer in pending_sends if not transfer.done}  # it may have left meanwhile
            return [member for member in self._others if member not in arrivals or member in unsent]

        self._wait(
            lambda: (
                self._mismatched == self._seq
                or (len(arrivals) == expected and all(transfer.done for _, transfer in pending_sends))
            ),
            missing,
        )

    def step(self, to: int | None, payload: Payload, source: int | None) -> Payload:
        """Send to a rank and receive from a rank; see Link.step."""
        part, self._round = self._round, self._round + 1
        if self._mismatched == self._seq:
            raise CallMismatchError
        arrived = self._step(part, to, payload, source)
        if arrived is None:
            return b""
        if arrived[0] != self._fingerprint:
            raise CallMismatchError
        return arrived[1]

    def _step(
        self, part: int, to: int | None, payload: Payload, source: int | None, *, describing: bool = False
    ) -> tuple[int, Payload] | None:
        """Make a step; return the fingerprint and the payload received, None without a source."""
        seq = self._seq
        pending: list[tuple[int, Transfer]] = []
        with self._engine.lock:
            received = self._arrived.setdefault((seq, part), {}) if source is not None else {}
            header = self._header(part, len(payload))
            if to is not None:
                pending = self._send((to,), header, payload)
            if source is not None and not pending:
                self._take((source,), header, len(payload), received)
        self._report_at = monotonic() + self.calls.seconds

        def ready() -> bool:
            if (source is None or source in received) and (not pending or all(sent.done for _, sent in pending)):
                return True
            return self._mismatched == seq and not describing

        def missing() -> list[int]:
            waited = [member for member, sent in pending if not sent.done]
            if source is not None and source not in received:
                waited = [source]
            return self.not_arrived(waited)

        if pending or (source is not None and source not in received):
            self._next_sources = [] if source is None else [source]
            self._wait(ready, missing, self._report_if_late)
        if source is None:
            return None
        arrived = self._arrived.pop((seq, part)).get(source)
        if arrived is None:
            raise CallMismatchError
        self._sources.append(source)
        return arrived

    def via_root(
        self, root: int, payload: Payload, respond: Callable[[list[Payload]], Payload | list[Payload]]
    ) -> Payload:
        """Arrive by way of a rank; see Link.via_root. The root receives every arrival, whatever the call."""
        if self.rank != root:
            self.step(root, payload, None)
            response = self.step(None, b"", root)
            self._complete = True
            return response
        seq, part = self._seq, self._round
        self._round += 2
        with self._engine.lock:
            arrivals = self._arrived.setdefault((seq, part), {})
        self._report_at = monotonic() + self.calls.seconds
        self._wait(
            lambda: len(arrivals) == self.size - 1 or self._mismatched == seq,
            lambda: [member for member in self._others if member not in arrivals],
            self._report_if_late,
        )
        arrived = {root: (self._fingerprint, payload), **self._arrived.pop((seq, part))}
        self._compare(arrived)
        self._complete = True
        responses = respond([arrived[member][1] for member in range(self.size)])
        with self._engine.lock:
            if isinstance(responses, list):
                pending_sends, response = self._send_each(part + 1, responses), responses[root]
            else:
                pending_sends, response = self._send_arrival(part + 1, self._others, responses), responses
        self.finish(pending_sends)
        return response

    def not_arrived(self, waited: list[int]) -> list[int]:
        """Return the ranks that have not arrived at the call, as far as this rank has heard.

        Args:
            waited: the ranks without which this rank does not go on; returned if they are lost, or all have arrived.
        """
        gone = {*self._engine.lost_peers, *self.departed}
        lost = [member for member in waited if self._ranks[member] in gone]
        if lost or self._complete:
            return lost or waited
        # Another rank that has left may have made the call: the ranks that wait for a message from it know.
        missing = self.calls.missing(self._seq, self._sources)
        return [member for member in missing if self._ranks[member] not in gone] or waited

    def check(self) -> None:
        """Report this rank's call, in a wait for other means than messages."""
        with self._engine.lock:
            if self._mismatched == self._seq:
                raise CallMismatchError
            if not self._complete:
                self._report_if_late()

    def _wait_and_connect(
        self,
        wait: Wait,
        ready: Callable[[], bool],
        missing: Callable[[], list[int]],
        idle: Callable[[], object] | None = None,
    ) -> None:
        """Wait; if that takes long, connect to the ranks whose messages are missing, perhaps fewer than ``missing``."""
        engine, connect_at = self._engine, monotonic() + _CONNECT_SECONDS
        awaited, self._next_sources = self._next_sources, None

        def connect() -> None:
            nonlocal connect_at
            if idle is not None:
                idle()
            if monotonic() > connect_at:
                connect_at = math.inf
                members = missing() if awaited is None else awaited
                engine.connect(self._ranks[member] for member in members[:_MAX_CONNECTED])

        wait(ready, missing, connect)

    def _report_if_late(self) -> None:
        """Report this rank's call now and then, if the others do not know it. With the lock held."""
        if monotonic() > self._report_at:
            self._report_at = monotonic() + self.calls.seconds
            self.calls.report(self._seq, self._fingerprint, self.describe()[:_MAX_TEXT])

    def exchange_descriptions(self, description: str) -> list[str]:
        """Exchange descriptions after a mismatch, at any point of the call; return one for each rank.

        In a large group, descriptions that would make a message too long are empty.
        """
        seq, calls = self._seq, self.calls
        with self._engine.lock:  # wakes the neighbours, which wake theirs
            calls.report(seq, DIFFERENT, description)
            self._mismatched, self._scratch = seq, np.empty(0, np.uint8)  # the old one may still receive messages
            self._parts.clear()
        if self.size <= FEW_RANKS:
            self._wait(
                lambda: len(calls.descriptions(seq)) == self.size,
                lambda: [member for member in self._others if member not in calls.descriptions(seq)],
            )
        else:
            for number, distance in enumerate(distances(self.size)):
                to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
                with self._engine.lock:
                    payload = calls.encode()
                found = self._step(_DESCRIPTIONS - number, to, payload, source, describing=True)
                assert found is not None
                with self._engine.lock:
                    calls.merge(found[1])
        texts = calls.descriptions(seq)
        return [texts.get(member, "") for member in range(self.size)]

    def _compare(self, arrived: dict[int, tuple[int, Payload]]) -> None:
        fingerprint = self._fingerprint
        if len(arrived) < self.size:
            raise CallMismatchError
        for other, _ in arrived.values():
            if other != fingerprint:
                raise CallMismatchError

    def _send_arrival(self, part: int, members: Sequence[int], payload: Payload) -> list[tuple[int, Transfer]]:
        return self._send(members, self._header(part, len(payload)), payload)

    def _send(self, members: Sequence[int], header: bytes, payload: Payload) -> list[tuple[int, Transfer]]:
        """Send an ENTER; return the unfinished transfers. With the engine's lock held."""
        pending_sends = []
        buffers = [header, payload] if len(payload) else [header]
        for member in members:
            transfer = Transfer()
            self._engine.send(self._ranks[member], buffers, transfer)
            if not transfer.done:
                pending_sends.append((member, transfer))
        return pending_sends

    def _take(
        self, members: Sequence[int], header: bytes, nbytes: int, arrivals: dict[int, tuple[int, Payload]]
    ) -> None:
        """Receive the arrivals with a header that come next and soon. With the engine's lock held."""
        for member in members:
            if member not in arrivals:
                payload = memoryview(bytearray(nbytes))
                if not self._engine.take(self._ranks[member], header, payload):
                    return
                arrivals[member] = self._fingerprint, payload

    def _header(self, part: int, nbytes: int, opcode: Opcode = _ENTER) -> bytes:
        return frames.encode(opcode, 0, self._group, self._engine.epoch, part, self._seq, 0, nbytes, self._fingerprint)

    def _send_each(self, part: int, payloads: Sequence[Payload]) -> list[tuple[int, Transfer]]:
        return [sent for member in self._others for sent in self._send_arrival(part, (member,), payloads[member])]

    def start(
        self, sends: Sequence[tuple[int, memoryview]], receives: Sequence[tuple[int, memoryview]], arrival: bytes = b""
    ) -> list[tuple[int, Transfer]]:
        """Begin to send and receive; see Link.start. A frame ``arrival`` precedes each message."""
        pending_sends: list[tuple[int, Transfer]] = []
        pending_receives: list[tuple[int, Transfer]] = []
        with self._engine.lock:
            for member, view in receives:
                if len(view):
                    pending_receives.append((member, transfer := Transfer()))
                    self._parts.post(self._ranks[member], (self._seq, self._fingerprint), view, transfer)
            for member, view in sends:
                buffers: list[Payload] = [arrival] if arrival else []
                if len(view):
                    buffers += self._header(0, len(view), Opcode.PART), view
                if buffers:
                    pending_sends.append((member, transfer := Transfer()))
                    self._engine.send(self._ranks[member], buffers, transfer)
            for member, _ in pending_receives:
                self._engine.resume(self._ranks[member])
        return pending_receives + pending_sends

    def finish(self, exchange: list[tuple[int, Transfer]]) -> None:
        """Wait for an exchange; see Link.finish."""
        pending = [(member, transfer) for member, transfer in exchange if not transfer.done]
        if not pending:
            return
        self._wait(
            lambda: all(transfer.done for _, transfer in pending),
            lambda: [member for member, transfer in pending if not transfer.done],
        )

    def scratch(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return scratch memory; see Link.scratch."""
        if self._scratch.size < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        return self._scratch[:nbytes]

    # Received frames; with the engine's lock held

    def buffer_for(self, rank: int, header: Header) -> memoryview | None:
        """Return the buffer of a PART, None while the algorithm has not posted it; see PostedParts for other calls."""
        if (header.seq, header.fingerprint) == (self._seq, self._fingerprint):
            view = self._parts.next_buffer(rank)
            if view is not None or self._mismatched != self._seq:
                return view
        return self._parts.new_buffer(rank, header.length) if header.length <= self.chunk_bytes else None

    def on_frame(self, rank: int, header: Header, payload: Payload) -> None:
        """Receive an ENTER, or note that a PART is complete."""
        if header.opcode is Opcode.ENTER:
            if header.part == _LAUNCHES:
                self.launches.merge(payload)
                return
            if header.part == _STATUS:
                self.calls.merge(payload)
                if self.calls.differs(self._seq, self._fingerprint):
                    self._mismatched = self._seq
                return
            seq = header.seq
            if seq < self._seq:
                return  # the call has ended without this arrival
            if seq == self._seq and header.fingerprint != self._fingerprint:
                self._mismatched = seq
            arrived = self._arrived.get((seq, header.part))
            if arrived is None:
                arrived = self._new_step(rank, seq, header.part)
            arrived[self._group_rank[rank]] = header.fingerprint, payload
        else:
            self._parts.complete(rank, header, (self._seq, self._fingerprint))

    def _new_step(self, rank: int, seq: int, part: int) -> dict[int, tuple[int, Payload]]:
        """Return the arrivals at a step at which none has been recorded; ProtocolError if the rank is too far ahead."""
        if len(self._arrived) >= _MAX_STEPS_AHEAD:
            self._arrived = {step: arrived for step, arrived in self._arrived.items() if step[0] >= self._seq}
            if len(self._arrived) >= _MAX_STEPS_AHEAD:
                raise ProtocolError(
                    f"rank {self._ranks[self._group_rank[rank]]} arrived at step {part} of call #{seq}, and this rank "
                    f"is at call #{self._seq}: arrivals at {_MAX_STEPS_AHEAD} steps are kept already"
                )
        arrived = self._arrived[seq, part] = {}
        return arrived


def _outside_call(
    ready: Callable[[], bool], missing: Callable[[], list[int]], idle: Callable[[], object] | None = None
) -> None:
    raise AssertionError("a message outside a call")
