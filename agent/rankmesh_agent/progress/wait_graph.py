"""Wait-for graph of the ranks, as far as it is needed to name the rank that holds up a call whose deadline is near.

A rank that is about to pass its deadline asks the ranks that it waits for which ranks they wait for, and asks those in
turn. A question may be stuck behind data that its receiver does not take yet; so the rank also reports its own waits to
the members of its group, and so does every rank that receives a frame of these, once. A rank answers while it waits,
since its engine moves bytes then: one that does not answer is stopped, cut off or busy elsewhere.

A process that has no free descriptor cannot accept connections, to the job's store say: ranks may wait for it without
a call of its own. It reports that as a wait for itself, to all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, NamedTuple

from rankmesh_agent.collectives.link import FEW_RANKS
from rankmesh_agent.net.descriptors import exhausted_since
from rankmesh_agent.progress import status
from rankmesh_agent.progress.framing import FrameSink
from rankmesh_agent.progress.status import Status
from rankmesh_agent.wire import frames
from rankmesh_agent.wire.frames import Header, Opcode

if TYPE_CHECKING:
    from rankmesh_agent.progress.engine import ProgressEngine

GROUP = 2**64 - 1
"""Stands for the group in the frames."""
ASK_SECONDS = 0.5
"""Seconds before a deadline at which a rank begins to ask."""
MIN_SECONDS = 1.0
"""Time limit of the shortest calls for which ranks are asked."""
_ANSWER_SECONDS = 0.2
"""Seconds after which a rank that has not answered counts as one that does not wait: twice a slice of its waits."""
_VALID_SECONDS = 2 * ASK_SECONDS
_EXHAUSTED_SECONDS = 1.5
"""Seconds for which it counts that this process has had no free descriptor: it tries again after at most a second."""
_EXHAUSTED_VALID_SECONDS = 3.0
"""The same of a report, which comes every second."""
_QUESTION, _ANSWER = 0, 1
_MAX_MEMBERS = 64
"""Members of a group to all of which waits are reported."""


class Stragglers(NamedTuple):
    """Ranks that hold up a call.

    Attributes:
        ranks: the ranks to blame.
        present: ranks that have arrived at the call.
        elsewhere: the waits of ranks that have not, by rank.
        exhausted: the ranks that have no free descriptor, with their reports: the cause, unless hosts are unreachable.
    """

    ranks: list[int]
    present: set[int]
    elsewhere: dict[int, Status]
    exhausted: dict[int, str]


class WaitGraph(FrameSink):
    """The waits that other ranks have reported. All methods are called with the engine's lock held.

    Args:
        exhausted_since: returns what in this process has had to wait for a free descriptor since a time, or nothing.

    Attributes:
        numbers: the numbers by which errors name ranks, as other ranks have reported them.
    """

    def __init__(self, engine: ProgressEngine, exhausted_since: Callable[[float], str] = exhausted_since) -> None:
        self.numbers: dict[int, int] = {}
        self._engine = engine
        self._exhausted_since = exhausted_since
        self._inquired = self._reported = -_VALID_SECONDS
        self._asked: dict[int, float] = {}
        self._answers: dict[int, tuple[float, list[Status]]] = {}
        self._exhausted: dict[int, tuple[float, str]] = {}

    def inquire(self, ranks: Iterable[int]) -> None:
        """Ask ranks for their waits, and those that they wait for; report the waits of this process.

        Of more ranks than a few, none is asked: all of them are to blame.
        """
        ranks = list(ranks)
        if len(ranks) > FEW_RANKS:
            return
        self._inquired = now = time.monotonic()
        self._ask(ranks)
        for at, waits in self._answers.values():  # reported before this rank has asked
            if now - at <= _VALID_SECONDS:
                self._ask(rank for wait in waits for rank, _ in wait.waits_for)
        self._report()

    def stragglers(self, ranks: Collection[int], group: int, seq: int, since: float = 0.0) -> Stragglers:
        """Return the ranks that hold up a call, or a message.

        These are the ranks whose hosts cannot be reached; or else those that do not answer; or else those that are not
        in the call; or else those that other ranks wait for and that have had no time to answer; or else those waited
        for.

        Args:
            seq: number of the collective, -1 for a message.
            since: when the call began.
        """
        now = time.monotonic()
        silent: list[int] = []
        absent: list[int] = []
        unknown: list[int] = []
        present = set()
        elsewhere: dict[int, Status] = {}
        todo, seen = list(ranks), {self._engine.rank, *ranks}
        while todo:
            rank = todo.pop(0)
            at, waits = self._answers.get(rank, (-_VALID_SECONDS, []))
            if now - at > _VALID_SECONDS:
                asked = _ANSWER_SECONDS <= now - self._asked.get(rank, -_VALID_SECONDS) <= _VALID_SECONDS
                (silent if asked else unknown).append(rank)
                continue
            here = waits if seq < 0 else [wait for wait in waits if (wait.group, wait.seq) == (group, seq)]
            if here:
                present.add(rank)
            else:
                absent.append(rank)
                if waits:
                    elsewhere[rank] = waits[0]
            for wait in waits:
                todo += [each for each, _ in wait.waits_for if each not in seen]
                seen.update(each for each, _ in wait.waits_for)
        unreachable = [rank for rank in silent if self._engine.silent_seconds(rank) > _ANSWER_SECONDS / 2]
        blamed = unreachable or silent or absent or unknown or list(ranks)
        return Stragglers(blamed, present, elsewhere, {} if unreachable else self.exhausted(since))

    def exhausted(self, since: float) -> dict[int, str]:
        """Return the ranks that have had no free descriptor lately, and since a time, with their reports."""
        since = max(since, time.monotonic() - _EXHAUSTED_VALID_SECONDS)
        found = {rank: text for rank, (at, text) in self._exhausted.items() if at > since}
        own = self._exhausted_since(max(since, time.monotonic() - _EXHAUSTED_SECONDS))
        return {self._engine.rank: own, **found} if own else found

    def report_exhaustion(self, ranks: Iterable[int]) -> None:
        """Report to these ranks that this process has no free descriptor, if that is so."""
        if self._own_exhaustion():
            payload = self._encode()
            for rank in ranks:
                self._frame(rank, _ANSWER, payload)

    def on_frame(self, rank: int, header: Header, payload: memoryview | bytes) -> None:
        """Answer a question, or record an answer and ask the ranks that it names."""
        now = time.monotonic()
        if header.part == _QUESTION:
            if self._engine.waits() or self._own_exhaustion():  # its engine may move bytes although it makes no call
                self._frame(rank, _ANSWER, self._encode())
        else:
            waits = []
            for wait, _ in status.decode(payload):
                awaited = [each for each, _ in wait.waits_for]
                if awaited == [rank]:
                    self._exhausted[rank] = now, wait.text
                elif all(0 <= each < self._engine.world_size for each in awaited):
                    waits.append(wait)
            self._answers[rank] = now, waits
            named = [pair for wait in waits for pair in wait.waits_for]
            self.numbers.update(named)
            if now - self._inquired <= _VALID_SECONDS:
                self._ask(each for each, _ in named)
        self._report()

    def on_peer_lost(self, rank: int) -> None:
        self._answers.pop(rank, None)

    def _own_exhaustion(self) -> str:
        return self._exhausted_since(time.monotonic() - _EXHAUSTED_SECONDS)

    def _ask(self, ranks: Iterable[int]) -> None:
        now = time.monotonic()
        for rank in ranks:
            if rank != self._engine.rank and now - self._asked.get(rank, -_VALID_SECONDS) > _VALID_SECONDS:
                self._asked[rank] = now
                self._frame(rank, _QUESTION, b"")

    def _report(self) -> None:
        """Send the waits of this process to the members of its groups, unless that has been done a moment ago."""
        now = time.monotonic()
        if now - self._reported <= _VALID_SECONDS:
            return
        members = {rank for wait in self._engine.waits() if len(wait.members) <= _MAX_MEMBERS for rank in wait.members}
        if members:
            self._reported = now
            payload = self._encode()
            for rank in members - {self._engine.rank}:
                if self._engine.is_connected(rank):
                    self._frame(rank, _ANSWER, payload)

    def _encode(self) -> bytes:
        waits, exhaustion, me = self._engine.waits(), self._own_exhaustion(), self._engine.rank
        if exhaustion:
            waits.insert(0, Status(0, -1, 0, exhaustion, ((me, me),)))
        return status.encode((wait, 0) for wait in waits)

    def _frame(self, rank: int, part: int, payload: bytes) -> None:
        epoch = self._engine.epoch
        header = frames.encode(Opcode.ENTER, group=GROUP, epoch=epoch, part=part, length=len(payload))
        self._engine.send(rank, [header, payload])
