"""The Link that collectives run over when a group has no shared memory: arrivals and posted pieces."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
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
"""Waits until the first is true; the second names the group ranks still missing. Raises when that cannot come true."""

Payload = memoryview | bytes


class CallProgress(NamedTuple):
    """How far another rank said that it has come: the number of its latest call, its fingerprint, and it in words."""

    seq: int
    fingerprint: int
    description: str


_RETELL = 0xFFFFFFFF
_REACHED = 0xFFFFFF00
"""The part of an ENTER that says how far a rank has come; nobody waits for it."""
_ANSWER = 0xFFFFFFFE
"""The part of rank 0's answer in the first round; that of the next round is one less."""
_PATIENCE = 0.05
"""Seconds until those who wait by way of rank 0 tell each other that they are there, to be able to say who is not."""
_PATIENCE_EACH = 0.02
"""The same for each member: in a large group that is many messages, and the members come further apart."""


class VerifiedLink(Link):
    """A Link for one call after the other."""

    @abstractmethod
    def begin(self, seq: int, fingerprint: int, wait: Wait) -> None:
        """Begin call number ``seq``.

        Args:
            seq: the call's number, counted the same at all ranks.
            fingerprint: of the call; ``enter`` compares everyone's.
            wait: see Watch.wait.
        """

    @abstractmethod
    def exchange_descriptions(self, payload: Payload) -> list[Payload]:
        """After a disagreement, wherever in the call it showed: tell everyone ``payload``, return what they tell."""


class MessageLink(VerifiedLink):
    """A group's messages during its calls, one call after the other.

    Args:
        mesh: what moves them.
        group: id of the group.
        ranks: global ranks of the members, by group rank.
        rank: this process's group rank.

    Attributes:
        reached: how far the others said that they have come, by group rank; see tell_reached.
    """

    def __init__(self, mesh: ProgressEngine, group: int, ranks: Sequence[int], rank: int) -> None:
        self.rank = rank
        self.size = len(ranks)
        self._mesh = mesh
        self._group = group
        self._ranks = tuple(ranks)
        self._others = self.others()
        self._group_rank = {member: number for number, member in enumerate(ranks)}
        # Peers can be one round ahead, not more: they need our arrival to go on.
        self._arrived: dict[tuple[int, int], dict[int, tuple[int, Payload]]] = {}
        self._posted: defaultdict[int, deque[tuple[int, memoryview, Transfer]]] = defaultdict(deque)
        self._seq = 0
        self._retold = -1
        """The latest call that others found to be different ones."""
        self._round = 0
        self._fingerprint = 0
        self._wait: Wait = _never
        self._scratch = np.empty(0, np.uint8)
        self.progress: dict[int, CallProgress] = {}

    def begin(self, seq: int, fingerprint: int, wait: Wait) -> None:
        """Begin call number ``seq``; see Rounds."""
        if seq != self._seq:
            for part in range(self._round):
                self._arrived.pop((self._seq, part), None)  # arrivals that were only told when the former call was over
        self._seq = seq
        self._round = 0
        self._fingerprint = fingerprint
        self._wait = wait

    def all_exchange(self, payload: Payload = b"", each: Sequence[Payload] | None = None) -> list[Payload]:
        """Arrive; see Link.enter.

        Raises:
            CallMismatchError: the ranks did not make the same call.
        """
        arrived = self._meet(self._round, payload, each)
        self._round += 1
        self._compare(arrived)
        return [arrived[member][1] for member in range(self.size)]

    def via_root(self, payload: Payload, decide: Callable[[list[Payload]], Payload]) -> Payload:
        """Arrive by way of rank 0; see Link.consult. Rank 0 hears from everyone, whatever they call: it disagrees.

        Raises:
            CallMismatchError: the ranks did not make the same call.
        """
        part, self._round = self._round, self._round + 1
        if self.rank:
            return self._ask(part, payload)
        heard = self._heard_of(part)
        self._wait(
            self._hailing(part, lambda: len(heard) == len(self._others) or self._retold == self._seq, self._others),
            lambda: [member for member in self._others if member not in heard],
        )
        arrived = {0: (self._fingerprint, payload), **self._arrived.pop((self._seq, part))}
        self._compare(arrived)
        answer = decide([arrived[member][1] for member in range(self.size)])
        going: list[tuple[int, Transfer]] = []
        with self._mesh.lock:
            self._tell(self._others, _ANSWER - part, answer, going)
        self.finish(going)
        return answer

    def _ask(self, part: int, payload: Payload) -> Payload:
        """Tell rank 0 ``payload`` and return its answer."""
        going: list[tuple[int, Transfer]] = []
        heard, answers = self._heard_of(part), self._heard_of(_ANSWER - part)
        with self._mesh.lock:
            self._tell((0,), part, payload, going)

        def answered() -> bool:
            return (bool(answers) and all(transfer.done for _, transfer in going)) or self._retold == self._seq

        def missing() -> list[int]:
            lost = self._mesh.lost_peers
            if self._ranks[0] in lost:
                return [0]
            # Another one that has left may have had its answer: rank 0 knows.
            return [member for member in self._others if member not in heard and self._ranks[member] not in lost] or [0]

        self._wait(self._hailing(part, answered, [member for member in self._others if member]), missing)
        self._arrived.pop((self._seq, part), None)
        arrived = self._arrived.pop((self._seq, _ANSWER - part))
        if not arrived:
            raise CallMismatchError
        return arrived[0][1]

    def _hailing(self, part: int, ready: Callable[[], bool], members: Sequence[int]) -> Callable[[], bool]:
        """Return ``ready`` with a side effect: if it takes long, some members are told that this rank is there."""
        until = time.monotonic() + max(_PATIENCE, _PATIENCE_EACH * self.size)

        def ready_or_hail() -> bool:
            nonlocal until
            if ready():
                return True
            if time.monotonic() > until:
                until = math.inf
                self._tell(members, part, b"", [])
            return False

        return ready_or_hail

    def exchange_descriptions(self, payload: Payload) -> list[Payload]:
        """See Rounds."""
        arrived = self._meet(_RETELL, payload)
        return [arrived[member][1] for member in range(self.size)]

    def _meet(
        self, part: int, payload: Payload, each: Sequence[Payload] | None = None
    ) -> dict[int, tuple[int, Payload]]:
        """Tell everyone, wait for everyone; return who told what. Somebody is missing only if others disagree."""
        going: list[tuple[int, Transfer]] = []
        heard = self._heard_of(part)
        expected = len(self._others)
        retelling = part == _RETELL
        with self._mesh.lock:
            if each is None:
                self._tell(self._others, part, payload, going)
            else:
                for member in self._others:
                    self._tell((member,), part, each[member], going)
        self._wait(
            lambda: (
                (len(heard) == expected and (not going or all(transfer.done for _, transfer in going)))
                or (self._retold == self._seq and not retelling)
            ),
            lambda: [member for member in self._others if member not in heard],
        )
        arrived = self._arrived.pop((self._seq, part))
        arrived[self.rank] = self._fingerprint, payload if each is None else each[self.rank]
        return arrived

    def _heard_of(self, part: int) -> dict[int, tuple[int, Payload]]:
        with self._mesh.lock:
            return self._arrived.setdefault((self._seq, part), {})

    def _compare(self, arrived: dict[int, tuple[int, Payload]]) -> None:
        if len(arrived) < self.size or any(said != self._fingerprint for said, _ in arrived.values()):
            raise CallMismatchError

    def _tell(self, members: Sequence[int], part: int, payload: Payload, going: list[tuple[int, Transfer]]) -> None:
        """Send an ENTER; add what is not sent at once to ``going``. With the mesh's lock held."""
        header = self._arrival(part, len(payload))
        buffers = [header, payload] if len(payload) else [header]
        for member in members:
            transfer = Transfer()
            self._mesh.send(self._ranks[member], buffers, transfer)
            if not transfer.done:
                going.append((member, transfer))

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

    def start(
        self, sends: Sequence[tuple[int, memoryview]], receives: Sequence[tuple[int, memoryview]]
    ) -> list[tuple[int, Transfer]]:
        """Begin to send and receive; see Link.start."""
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
        return coming + going

    def finish(self, exchange: list[tuple[int, Transfer]]) -> None:
        """Wait for what was begun; see Link.finish."""
        pending = [(member, transfer) for member, transfer in exchange if not transfer.done]
        if not pending:
            return
        self._wait(
            lambda: all(transfer.done for _, transfer in pending),
            lambda: [member for member, transfer in pending if not transfer.done],
        )

    def scratch(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return memory of the link's own; see Link.scratch."""
        if self._scratch.size < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        return self._scratch[:nbytes]

    def report_progress(self, seq: int, fingerprint: int, words: str) -> None:
        """Tell the others which call this rank is in, or was last, without a wait; see CallProgress."""
        payload = words.encode()[: frames.SMALL]
        header = frames.encode(
            Opcode.ENTER,
            group=self._group,
            epoch=self._mesh.epoch,
            part=_REACHED,
            seq=seq,
            length=len(payload),
            fingerprint=fingerprint,
        )
        with self._mesh.lock:
            for member in self._others:
                self._mesh.send(self._ranks[member], [header, payload])

    def lagging(self, seq: int) -> list[int]:
        """Return the others that have not said that they have come as far as call number ``seq``."""
        reached = self.progress
        return [member for member in self._others if member not in reached or reached[member].seq < seq]

    # What comes from the peers; with the mesh's lock held

    def buffer_for(self, rank: int, header: Header) -> memoryview | None:
        """Return where a PART goes, None while the algorithm has not come so far."""
        posted = self._posted[rank]
        if posted and posted[0][0] == header.seq:
            return posted[0][1]
        return None

    def on_frame(self, rank: int, header: Header, payload: Payload) -> None:
        """Take an ENTER, or note that a PART is complete."""
        if header.opcode is Opcode.ENTER:
            if header.part == _REACHED:
                words = bytes(payload).decode(errors="replace")
                self.progress[self._group_rank[rank]] = CallProgress(header.seq, header.fingerprint, words)
                return
            if header.seq < self._seq:
                return  # a call that is over: the others knew without it that the rank was there
            if header.part == _RETELL:
                self._retold = header.seq
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
