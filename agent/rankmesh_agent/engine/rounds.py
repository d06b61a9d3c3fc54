"""The Link that collectives run over when a group has no shared memory: arrivals and posted pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from rankmesh_agent.collectives.link import Link
from rankmesh_agent.engine.mesh import Mesh
from rankmesh_agent.engine.peer import Transfer
from rankmesh_agent.transports.segment import DisagreementError
from rankmesh_agent.wire import frames
from rankmesh_agent.wire.frames import Header, Opcode

Wait = Callable[[Callable[[], bool], Callable[[], list[int]]], None]
"""Waits until the first is true; the second names the group ranks still missing. Raises when that cannot come true."""

Payload = memoryview | bytes
_RETELL = 0xFFFFFFFF


class MessageLink(Link):
    """A group's messages during its calls, one call after the other.

    Args:
        mesh: what moves them.
        group: id of the group.
        ranks: global ranks of the members, by group rank.
        rank: this process's group rank.
    """

    def __init__(self, mesh: Mesh, group: int, ranks: Sequence[int], rank: int) -> None:
        self.rank = rank
        self.size = len(ranks)
        self._mesh = mesh
        self._group = group
        self._ranks = tuple(ranks)
        self._others = self.others()
        self._group_rank = {member: number for number, member in enumerate(ranks)}
        # Peers can be one round ahead, not more: they need our arrival to go on.
        self._arrived: dict[tuple[int, int], dict[int, tuple[int, Payload]]] = {}
        self._posted: dict[int, deque[tuple[int, memoryview, Transfer]]] = {member: deque() for member in ranks}
        self._seq = 0
        self._round = 0
        self._fingerprint = 0
        self._wait: Wait = _never

    def begin(self, seq: int, fingerprint: int, wait: Wait) -> None:
        """Begin call number ``seq``."""
        self._seq = seq
        self._round = 0
        self._fingerprint = fingerprint
        self._wait = wait

    def enter(self, payload: Payload = b"", each: Sequence[Payload] | None = None) -> list[Payload]:
        """Arrive; see Link.enter.

        Raises:
            DisagreementError: the ranks did not make the same call.
        """
        arrived = self._meet(self._round, payload, each)
        self._round += 1
        if any(fingerprint != self._fingerprint for fingerprint, _ in arrived.values()):
            raise DisagreementError
        return [arrived[member][1] for member in range(self.size)]

    def retell(self, payload: Payload) -> list[Payload]:
        """After a disagreement, wherever in the call it showed: tell everyone ``payload``, return what they tell."""
        arrived = self._meet(_RETELL, payload)
        return [arrived[member][1] for member in range(self.size)]

    def _meet(
        self, part: int, payload: Payload, each: Sequence[Payload] | None = None
    ) -> dict[int, tuple[int, Payload]]:
        key = self._seq, part
        header = self._arrival(part, len(payload))
        going = []
        with self._mesh.lock:
            arrived = self._arrived.setdefault(key, {})
            for member in self._others:
                if each is not None:
                    payload = each[member]
                    header = self._arrival(part, len(payload))
                transfer = Transfer()
                self._mesh.send(self._ranks[member], [header, payload] if len(payload) else [header], transfer)
                if not transfer.done:
                    going.append(transfer)
        expected = len(self._others)
        self._wait(
            lambda: len(arrived) == expected and (not going or all(transfer.done for transfer in going)),
            lambda: [member for member in self._others if member not in arrived],
        )
        with self._mesh.lock:
            del self._arrived[key]
        arrived[self.rank] = self._fingerprint, payload if each is None else each[self.rank]
        return arrived

    def _arrival(self, part: int, length: int) -> bytes:
        return frames.encode(
            Opcode.ENTER,
            group=self._group,
            epoch=self._mesh.epoch,
            part=part,
            seq=self._seq,
            length=length,
            fingerprint=self._fingerprint,
        )

    def exchange(self, sends: Sequence[tuple[int, memoryview]], receives: Sequence[tuple[int, memoryview]]) -> None:
        """Send and receive; see Link.exchange."""
        going: list[tuple[int, Transfer]] = []
        coming: list[tuple[int, Transfer]] = []
        with self._mesh.lock:
            for member, view in receives:
                if len(view):
                    coming.append((member, transfer := Transfer()))
                    self._posted[self._ranks[member]].append((self._seq, view, transfer))
            for member, view in sends:
                if len(view):
                    going.append((member, transfer := Transfer()))
                    self._mesh.send(self._ranks[member], [self._part(len(view)), view], transfer)
            for member, _ in coming:
                self._mesh.resume(self._ranks[member])
        pending = coming + going
        self._wait(
            lambda: all(transfer.done for _, transfer in pending),
            lambda: [member for member, transfer in pending if not transfer.done],
        )

    # What comes from the peers; with the mesh's lock held

    def place(self, rank: int, header: Header) -> memoryview | None:
        """Return where a PART goes, None while the algorithm has not come so far."""
        posted = self._posted[rank]
        if posted and posted[0][0] == header.seq:
            return posted[0][1]
        return None

    def deliver(self, rank: int, header: Header, payload: Payload) -> None:
        """Take an ENTER, or note that a PART is complete."""
        if header.opcode is Opcode.ENTER:
            arrived = self._arrived.setdefault((header.seq, header.part), {})
            arrived[self._group_rank[rank]] = header.fingerprint, payload
        else:
            self._posted[rank].popleft()[2].done = True

    def _part(self, length: int) -> bytes:
        return frames.encode(
            Opcode.PART,
            group=self._group,
            epoch=self._mesh.epoch,
            seq=self._seq,
            length=length,
            fingerprint=self._fingerprint,
        )


def _never(ready: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
    raise AssertionError("a message outside a call")
