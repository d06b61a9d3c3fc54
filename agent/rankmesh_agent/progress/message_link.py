"""The Link of a group without shared memory: arrivals at a call, and frames for posted buffers."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rankmesh_agent.collectives.link import Link
from rankmesh_agent.progress.engine import ProgressEngine
from rankmesh_agent.progress.framing import Transfer
from rankmesh_agent.transports.slots import CallMismatchError
from rankmesh_agent.wire import frames
from rankmesh_agent.wire.frames import Header, Opcode

Wait = Callable[[Callable[[], bool], Callable[[], list[int]]], None]
"""Waits until the first returns true, or raises once it cannot; the second returns the missing group ranks."""

Payload = memoryview | bytes


class CallProgress(NamedTuple):
    """The latest call that another rank has reported: its number, its fingerprint, and a description."""

    seq: int
    fingerprint: int
    description: str


_DESCRIPTIONS = 0xFFFFFFFF
_PROGRESS = 0xFFFFFF00
"""The part of an ENTER that reports a rank's latest call; no rank waits for it."""
_RESPONSE = 0xFFFFFFFE
"""The part of rank 0's response in the first round; that of the next round is one less."""
_ANNOUNCE_SECONDS = 0.05
"""Seconds after which ranks that wait for rank 0 announce themselves to each other, so that errors name the missing."""
_ANNOUNCE_SECONDS_EACH = 0.02
"""The same for each member: in a large group there are many such messages, and the ranks arrive further apart."""


class VerifiedLink(ABC):
    """Arrivals of the ranks at consecutive calls, which verify that all ranks make the same one.

    Attributes:
        rank: this rank in the group.
        size: ranks in the group.
    """

    rank: int
    size: int

    @abstractmethod
    def begin(self, seq: int, fingerprint: int, wait: Wait) -> None:
        """Begin call number ``seq``.

        Args:
            seq: the call's number, the same at all ranks.
            fingerprint: fingerprint of the call; ``all_exchange`` compares the fingerprints of all ranks.
            wait: see Wait.
        """

    @abstractmethod
    def all_exchange(self) -> list[Payload]:
        """Arrive at the call, and wait for every rank.

        Raises:
            CallMismatchError: the ranks have made different calls.
        """

    @abstractmethod
    def exchange_descriptions(self, payload: Payload) -> list[Payload]:
        """Exchange descriptions after a mismatch, at any point of the call; return one for each rank."""


class MessageLink(VerifiedLink, Link):
    """The messages of a group during its calls.

    Args:
        engine: the progress engine.
        group: id of the group.
        ranks: global ranks of the members, by group rank.
        rank: this process's group rank.

    Attributes:
        progress: the latest calls that the other ranks have reported, by group rank; see report_progress.
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
        # Peers are at most one round ahead: they need the arrival of this rank to continue.
        self._arrived: dict[tuple[int, int], dict[int, tuple[int, Payload]]] = {}
        self._posted: defaultdict[int, deque[tuple[int, memoryview, Transfer]]] = defaultdict(deque)
        self._seq = 0
        self._mismatched = -1
        """The latest call in which other ranks found a mismatch."""
        self._round = 0
        self._fingerprint = 0
        self._wait: Wait = _outside_call
        self._scratch = np.empty(0, np.uint8)
        self.progress: dict[int, CallProgress] = {}
        self.departed: Collection[int] = ()

    def begin(self, seq: int, fingerprint: int, wait: Wait) -> None:
        """See VerifiedLink."""
        if seq != self._seq:
            for part in range(self._round):
                self._arrived.pop((self._seq, part), None)  # arrivals received after the end of the previous call
        self._seq = seq
        self._round = 0
        self._fingerprint = fingerprint
        self._wait = wait

    def all_exchange(self, payload: Payload = b"", each: Sequence[Payload] | None = None) -> list[Payload]:
        """Arrive; see Link.all_exchange.

        Raises:
            CallMismatchError: the ranks have made different calls.
        """
        arrived = self._exchange_with_all(self._round, payload, each)
        self._round += 1
        self._compare(arrived)
        return [arrived[member][1] for member in range(self.size)]

    def via_root(self, payload: Payload, decide: Callable[[list[Payload]], Payload]) -> Payload:
        """Arrive via rank 0; see Link.via_root. Rank 0 receives every arrival, whatever the call, and compares them.

        Raises:
            CallMismatchError: the ranks have made different calls.
        """
        part, self._round = self._round, self._round + 1
        if self.rank:
            return self._query_root(part, payload)
        arrivals = self._arrivals_at(part)
        self._wait(
            self._or_announce(
                part, lambda: len(arrivals) == len(self._others) or self._mismatched == self._seq, self._others
            ),
            lambda: [member for member in self._others if member not in arrivals],
        )
        arrived = {0: (self._fingerprint, payload), **self._arrived.pop((self._seq, part))}
        self._compare(arrived)
        response = decide([arrived[member][1] for member in range(self.size)])
        with self._engine.lock:
            pending_sends = self._send_arrival(self._others, _RESPONSE - part, response)
        self.finish(pending_sends)
        return response

    def _query_root(self, part: int, payload: Payload) -> Payload:
        """Send ``payload`` to rank 0 and return its response."""
        arrivals, responses = self._arrivals_at(part), self._arrivals_at(_RESPONSE - part)
        with self._engine.lock:
            pending_sends = self._send_arrival((0,), part, payload)

        def responded() -> bool:
            return (
                bool(responses) and all(transfer.done for _, transfer in pending_sends)
            ) or self._mismatched == self._seq

        def missing() -> list[int]:
            gone = {*self._engine.lost_peers, *self.departed}
            if self._ranks[0] in gone:
                return [0]
            # Another rank that has left may have received its response: rank 0 knows.
            return [
                member for member in self._others if member not in arrivals and self._ranks[member] not in gone
            ] or [0]

        self._wait(self._or_announce(part, responded, [member for member in self._others if member]), missing)
        self._arrived.pop((self._seq, part), None)
        arrived = self._arrived.pop((self._seq, _RESPONSE - part))
        if not arrived:
            raise CallMismatchError
        return arrived[0][1]

    def _or_announce(self, part: int, ready: Callable[[], bool], members: Sequence[int]) -> Callable[[], bool]:
        """Return ``ready`` with a side effect: after some time this rank announces itself to ``members``."""
        until = time.monotonic() + max(_ANNOUNCE_SECONDS, _ANNOUNCE_SECONDS_EACH * self.size)

        def ready_or_announce() -> bool:
            nonlocal until
            if ready():
                return True
            if time.monotonic() > until:
                until = math.inf
                self._send_arrival(members, part, b"")
            return False

        return ready_or_announce

    def exchange_descriptions(self, payload: Payload) -> list[Payload]:
        """See VerifiedLink."""
        arrived = self._exchange_with_all(_DESCRIPTIONS, payload)
        return [arrived[member][1] for member in range(self.size)]

    def _exchange_with_all(
        self, part: int, payload: Payload, each: Sequence[Payload] | None = None
    ) -> dict[int, tuple[int, Payload]]:
        """Send to all ranks and wait for all; return the payloads by rank. Some are missing only after a mismatch."""
        expected = len(self._others)
        describing = part == _DESCRIPTIONS
        with self._engine.lock:
            arrivals = self._arrived.setdefault((self._seq, part), {})
            if each is None:
                pending_sends = self._send_arrival(self._others, part, payload)
            else:
                pending_sends = []
                for member in self._others:
                    pending_sends += self._send_arrival((member,), part, each[member])
        self._wait(
            lambda: (
                (
                    len(arrivals) == expected
                    and (not pending_sends or all(transfer.done for _, transfer in pending_sends))
                )
                or (self._mismatched == self._seq and not describing)
            ),
            lambda: [member for member in self._others if member not in arrivals],
        )
        arrived = self._arrived.pop((self._seq, part))
        arrived[self.rank] = self._fingerprint, payload if each is None else each[self.rank]
        return arrived

    def _arrivals_at(self, part: int) -> dict[int, tuple[int, Payload]]:
        with self._engine.lock:
            return self._arrived.setdefault((self._seq, part), {})

    def _compare(self, arrived: dict[int, tuple[int, Payload]]) -> None:
        fingerprint = self._fingerprint
        if len(arrived) < self.size:
            raise CallMismatchError
        for other, _ in arrived.values():
            if other != fingerprint:
                raise CallMismatchError

    def _send_arrival(self, members: Sequence[int], part: int, payload: Payload) -> list[tuple[int, Transfer]]:
        """Send an ENTER; return the unfinished transfers. With the engine's lock held."""
        pending_sends = []
        header = frames.encode(
            Opcode.ENTER, 0, self._group, self._engine.epoch, part, self._seq, 0, len(payload), self._fingerprint
        )
        buffers = [header, payload] if len(payload) else [header]
        for member in members:
            transfer = Transfer()
            self._engine.send(self._ranks[member], buffers, transfer)
            if not transfer.done:
                pending_sends.append((member, transfer))
        return pending_sends

    def start(
        self, sends: Sequence[tuple[int, memoryview]], receives: Sequence[tuple[int, memoryview]]
    ) -> list[tuple[int, Transfer]]:
        """Begin to send and receive; see Link.start."""
        pending_sends: list[tuple[int, Transfer]] = []
        pending_receives: list[tuple[int, Transfer]] = []
        with self._engine.lock:
            for member, view in receives:
                if len(view):
                    pending_receives.append((member, transfer := Transfer()))
                    self._posted[self._ranks[member]].append((self._seq, view, transfer))
            for member, view in sends:
                if len(view):
                    pending_sends.append((member, transfer := Transfer()))
                    header = frames.encode(
                        Opcode.PART, 0, self._group, self._engine.epoch, 0, self._seq, 0, len(view), self._fingerprint
                    )
                    self._engine.send(self._ranks[member], [header, view], transfer)
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

    def report_progress(self, seq: int, fingerprint: int, description: str) -> None:
        """Report this rank's latest call to the other ranks, without waiting; see CallProgress."""
        payload = description.encode()[: frames.SMALL]
        header = frames.encode(
            Opcode.ENTER, 0, self._group, self._engine.epoch, _PROGRESS, seq, 0, len(payload), fingerprint
        )
        with self._engine.lock:
            for member in self._others:
                self._engine.send(self._ranks[member], [header, payload])

    def lagging(self, seq: int) -> list[int]:
        """Return the other ranks that have not reported call number ``seq`` or a later one."""
        reached = self.progress
        return [member for member in self._others if member not in reached or reached[member].seq < seq]

    # Received frames; with the engine's lock held

    def buffer_for(self, rank: int, header: Header) -> memoryview | None:
        """Return the buffer of a PART, None while the algorithm has not posted it."""
        posted = self._posted[rank]
        if posted and posted[0][0] == header.seq:
            return posted[0][1]
        return None

    def on_frame(self, rank: int, header: Header, payload: Payload) -> None:
        """Receive an ENTER, or note that a PART is complete."""
        if header.opcode is Opcode.ENTER:
            if header.part == _PROGRESS:
                description = bytes(payload).decode(errors="replace")
                self.progress[self._group_rank[rank]] = CallProgress(header.seq, header.fingerprint, description)
                return
            if header.seq < self._seq:
                return  # the call has ended without this announcement
            if header.part == _DESCRIPTIONS:
                self._mismatched = header.seq
            arrived = self._arrived.setdefault((header.seq, header.part), {})
            arrived[self._group_rank[rank]] = header.fingerprint, payload
        else:
            self._posted[rank].popleft()[2].done = True


def _outside_call(ready: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
    raise AssertionError("a message outside a call")
