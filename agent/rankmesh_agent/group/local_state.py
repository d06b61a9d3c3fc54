"""Failure state and current call of a group whose messages this process's progress engine moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rankmesh_agent.group.flight_recorder import FlightRecorder
from rankmesh_agent.group.state import START_UP, GroupState
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.descriptors import DescriptorLimitError
from rankmesh_agent.net.interrupts import interrupts_deferred
from rankmesh_agent.progress.engine import ProgressEngine
from rankmesh_agent.progress.status import Status
from rankmesh_agent.progress.wait_graph import ASK_SECONDS, MIN_SECONDS
from rankmesh_agent.wire import frames, goodbye, json_text
from rankmesh_agent.wire.errors import (
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    GroupAbortedError,
    RankFailedError,
    from_frame,
    to_frame,
    without_traceback,
)
from rankmesh_agent.wire.frames import Opcode
from rankmesh_agent.wire.goodbye import Goodbye
from rankmesh_agent.wire.overlay import neighbours
from rankmesh_agent.wire.ranges import FEW, ranges, shortened
from rankmesh_agent.wire.schemas import Member

_BECAUSE = "; because of it "
"""Precedes, in the error of a failure elsewhere, the rank that left because of it."""
_DESCRIBED = 4
"""Of many ranks that hold up a call, those that the error describes."""
_ABORT_FLUSH_SECONDS = 0.5


class LocalGroupState(GroupState):
    """State of a group whose messages this process's progress engine moves. Ranks are the engine's.

    Attributes:
        departed: the ranks that have left the group, but not the job.
    """

    def __init__(
        self,
        engine: ProgressEngine,
        group: int,
        name: str,
        ranks: tuple[int, ...],
        members: dict[int, Member],
        recorder: FlightRecorder,
    ) -> None:
        super().__init__(group, name, ranks, recorder, engine.lock)
        self.engine = engine
        self._members = members
        self._abort_sent = False
        self._loss: DistError | None = None
        self._lost_rank = -1
        self._lost_when = ""
        self.departed: dict[int, Goodbye] = {}
        self._latest_wait: tuple[int, Callable[[], list[int]]] = -1, list
        """The latest wait: the number of its call, and what returns the group ranks that are missing."""
        self._asked = -1
        self._ask_by = Deadline(0)

    def forget_wait(self) -> None:
        """Drop the reference to the latest wait, which keeps the group's shared memory mapped; no call is under way."""
        self._latest_wait = -1, list

    def check(self, missing: Callable[[], list[int]]) -> None:
        engine = self.engine
        self._latest_wait = self.seq, missing
        if self.failure is None:
            engine.progress()
        if self.failure is not None:
            raise without_traceback(self.failure)
        if engine.closed:
            raise GroupAbortedError("this process has left the job")
        waiting_for = [self.ranks[member] for member in missing()]
        if not waiting_for:
            return  # the last one came meanwhile, and may have left since
        during = f"{self.call.name} #{self.seq}"
        if engine.lost_peers or self.departed:
            self.raise_if_peer_lost(waiting_for, during)
        deadline = self.deadline
        if deadline.expired():
            raise self.timeout_error(waiting_for, during, deadline, self.seq, own=True)
        # A short deadline leaves no time to ask other ranks for their waits.
        if self._asked != self.seq and deadline.seconds >= MIN_SECONDS and deadline.remaining() <= ASK_SECONDS:
            self._asked = self.seq
            with engine.lock:
                engine.wait_graph.inquire(waiting_for)

    def statuses(self) -> list[Status]:
        """Return the wait of the call under way, as other ranks are answered. With the engine's lock held."""
        if self.started_at is None:
            return []
        seq, missing = self._latest_wait
        members = missing() if seq == self.seq else []
        ranks = tuple((self.ranks[member], self.global_ranks[member]) for member in members)
        text = f"{self.call.name} #{self.seq} in group {self.name!r}"
        return [Status(self.group, self.seq, self.call.fingerprint, text, ranks, self.ranks)]

    def wait(
        self, ready: Callable[[], bool], missing: Callable[[], list[int]], idle: Callable[[], object] | None = None
    ) -> None:
        engine = self.engine
        self._latest_wait = self.seq, missing
        end, deadline = self._ask_by, self.deadline
        end.at = deadline.at - (ASK_SECONDS if deadline.seconds >= MIN_SECONDS else 0.0)
        while not engine.wait(ready, end, self._hopeless, idle):
            self.check(missing)
            if end.expired():
                end = deadline

    def _hopeless(self) -> bool:
        """Return whether the latest wait cannot end well. With the engine's lock held."""
        if self.failure is not None:
            return True
        if not self.engine.lost_peers and not self.departed:
            return False
        return bool(self.gone([self.ranks[member] for member in self._latest_wait[1]()]))

    def raise_if_peer_lost(self, waiting_for: Sequence[int], during: str, *, any_will_do: bool = False) -> None:
        """Raise if a rank that is waited for is lost; where any of them will do, if all are."""
        lost = self.gone(waiting_for, any_will_do=any_will_do)
        if lost:
            self.engine.progress()  # a rank may have left because another died: that is the failure then
            self.raise_if_failed()
            raise self._peer_lost_error(lost[0], f"during {during}")

    def cannot_complete(self, waiting_for: Sequence[int], *, any_will_do: bool = False) -> bool:
        """Return whether a wait for these ranks cannot end well. With the engine's lock held."""
        return self.failure is not None or bool(self.gone(waiting_for, any_will_do=any_will_do))

    def gone(self, ranks: Sequence[int], *, any_will_do: bool = False) -> list[int]:
        """Return those of the ranks that have left the group or the job, or are lost; if any will do, none or all."""
        lost_peers, departed = self.engine.lost_peers, self.departed
        gone = [rank for rank in ranks if rank in lost_peers or rank in departed]
        return [] if any_will_do and len(gone) < len(ranks) else gone

    def timeout_error(
        self, waiting_for: Sequence[int], during: str, deadline: Deadline, seq: int | None, *, own: bool = False
    ) -> CollectiveTimeoutError | DescriptorLimitError:
        """Return the error of a deadline that passed: it lists the ranks that hold it up, and those that arrived.

        It names the ranks that have no free descriptor, if there are any, in place of those that are late. For the
        operation's ``own`` deadline it is a DescriptorLimitError if they include this rank.
        """
        graph = self.engine.wait_graph
        with self.engine.lock:
            blamed, present, elsewhere, exhausted = graph.stragglers(
                waiting_for, self.group, -1 if seq is None else seq, deadline.at - deadline.seconds
            )
        numbers = graph.numbers | dict(zip(self.ranks, self.global_ranks, strict=True))
        described = blamed if len(blamed) <= FEW else blamed[:_DESCRIBED]
        names = ", ".join(map(self._describe, described))
        if len(blamed) > len(described):
            names += f" and ranks {', '.join(ranges(numbers.get(rank, rank) for rank in blamed[_DESCRIBED:]))}"
        missing = {*blamed} | ({*waiting_for} - present)
        arrived = shortened([numbers[rank] for rank in self.ranks if rank not in missing])
        unaddressed = self.engine.unaddressed
        others = [f"rank {numbers.get(rank, rank)} waits in {wait.text}" for rank, wait in elsewhere.items()][:FEW]
        others += [f"{self._describe(rank)} reports: {report}" for rank, report in exhausted.items()][:FEW]
        others += [f"rank {numbers[rank]}: {unaddressed[rank]}" for rank in waiting_for if rank in unaddressed][:FEW]
        kind = DescriptorLimitError if own and self.engine.rank in exhausted else CollectiveTimeoutError
        return kind(
            f"{during} in group {self.name!r} waited {deadline.seconds:.1f} s for {names or 'the transport'}; "
            + "; ".join([f"arrived: {arrived or 'none'}", *others]),
            ranks=[numbers.get(rank, rank) for rank in exhausted or blamed],
            op=during.partition(" ")[0],
            group=self.name,
            seq=seq,
        )

    def on_peer_lost(self, rank: int) -> None:
        """Record that a peer is lost; a member that died ends the group. With the engine's lock held."""
        if rank in self.ranks and not self.engine.lost_peers[rank].clean and self.failure is None:
            self._lost_rank, self._lost_when = rank, self._current_call()
            self._loss = self._peer_lost_error(rank, self._lost_when)
            self.fail(self._loss)

    def renumber(self, global_ranks: tuple[int, ...]) -> None:
        with self.lock:
            super().renumber(global_ranks)
            if self._loss is not None and self.failure is self._loss:
                self.failure = self._loss = self._peer_lost_error(self._lost_rank, self._lost_when)

    def on_abort(self, payload: bytes) -> None:
        """Record the failure that another member reports, and pass it on. With the engine's lock held."""
        first, self._abort_sent = not self._abort_sent, True
        self.fail(self._with_own_report(_decode_failure(payload)))
        if first and self.engine.on_demand:
            self._send_to_all(payload, relay=True)

    def _with_own_report(self, failure: DistError) -> DistError:
        """Return another rank's failure, with the report of this one if that names it and it has no free descriptor."""
        me = self.engine.rank
        own = self.engine.wait_graph.exhausted(0.0).get(me)
        if own is None or type(failure) is not GroupAbortedError or self.global_rank(me) not in failure.ranks:
            return failure
        report = f"; {self._describe(me)} reports: {own}"
        text = failure.message if report in failure.message else failure.message + report
        return DescriptorLimitError(text, **failure.details())

    def on_departure(self, rank: int, payload: bytes) -> None:
        """Record that a member has left the group: waits that need it end. With the engine's lock held."""
        self.departed[rank] = goodbye.decode(payload)

    def leave(self, how: Goodbye) -> None:
        """Inform the members that this rank leaves the group, unless it has failed."""
        payload = how.encode()
        with self.engine.lock:
            if self.failure is None:
                frame = self._send_to_all(payload, goodbye.GROUP)
                if self.engine.on_demand:
                    self.engine.departures.append((self.ranks, frame))

    def mark_destroyed(self) -> None:
        """See GroupState. The goodbye of this rank gives the reason, not the calls that fail here now."""
        self._abort_sent = True
        super().mark_destroyed()

    def end_in_child(self) -> None:
        self._abort_sent = True
        super().end_in_child()

    def abort(self, error: BaseException) -> None:
        rank = self.engine.rank
        if isinstance(error, DistError):
            failure = error
        else:
            text = f"{self._describe(rank)} gave up {self._current_call()}: {type(error).__name__} {error}".rstrip()
            failure = GroupAbortedError(text, ranks=[self.global_rank(rank)], group=self.name)
        sent = failure
        own = type(error) is DistBackendError or isinstance(error, DescriptorLimitError)  # not one that all ranks have
        if own or isinstance(error, CollectiveTimeoutError):
            details = failure.details()
            if own:
                details.setdefault("ranks", [self.global_rank(rank)])
            text = f"{self._describe(rank)} gave up: {failure.message}"
            sent = GroupAbortedError(text, **details)
        with interrupts_deferred():
            with self.engine.lock:
                self._end(failure, sent)
                self.engine.unregister_sink(self.group)
            self.engine.flush(_ABORT_FLUSH_SECONDS)

    def on_misfit(self, why: str) -> None:
        """End the group because of a message that is done at its sender. With the engine's lock held."""
        me = self.global_rank(self.engine.rank)
        failure = GroupAbortedError(f"rank {me} refused the message: {why}", op="recv", group=self.name)
        self._end(failure, failure)

    def _end(self, failure: DistError, sent: DistError) -> None:
        """Record the failure, and send an error to the members unless they know. With the engine's lock held."""
        if self.failure is None:
            self.fail(without_traceback(failure))
        informed, self._abort_sent = self._abort_sent, True
        if not informed and {*self.ranks} - self.engine.lost_peers.keys() - {self.engine.rank}:
            self._send_to_all(json_text.encode(to_frame(sent)), relay=True)

    def broadcast_abort(self) -> None:
        """See GroupState. This rank may leave because of the failure, and must not be blamed.

        A member may learn of a loss later than this rank does, and of this rank's goodbye before.
        """
        failure = self.failure
        if failure is not None and not self._abort_sent:
            self.abort(failure)

    def _send_to_all(self, payload: bytes, part: int = 0, *, relay: bool = False) -> list[bytes]:
        """Send an ABORT to all members; in a large group to the connected ones and the neighbours, who pass it on."""
        engine, members = self.engine, set(self.ranks) - {self.engine.rank}
        frame = [frames.encode(Opcode.ABORT, 0, self.group, engine.epoch, part, length=len(payload)), payload]
        if engine.on_demand:
            near = neighbours(self.ranks.index(engine.rank), len(self.ranks), 0) if relay else []
            members = {rank for rank in members if engine.is_connected(rank)} | {self.ranks[member] for member in near}
        for rank in sorted(members):
            engine.send(rank, frame)
        return frame

    def _current_call(self) -> str:
        if self.call is START_UP:
            return "during start-up #0"
        return f"{'after' if self.started_at is None else 'during'} {self.call.name} #{self.seq}"

    def loss_error(self, rank: int, end: Goodbye | None = None) -> DistBackendError:
        """Return the error of the loss of a member, by default as the engine knows its end. With the lock held."""
        return self._peer_lost_error(rank, self._current_call(), end)

    def _peer_lost_error(self, rank: int, when: str, end: Goodbye | None = None) -> DistBackendError:
        who = self._describe(rank)
        kind: type[DistBackendError] = RankFailedError
        ranks: Sequence[int] = [self.global_rank(rank)]
        departure = self.departed.get(rank)
        if departure is not None:
            cause, first = departure.reason, departure.failure
            ranks = departure.ranks or ranks
            kind, text = GroupAbortedError, f"{who} left the group ({cause})"
        else:
            lost = end or self.engine.lost_peers[rank]
            cause, first = lost.reason, lost.failure
            text = f"{who} failed ({cause})" if lost.died else f"{who} left ({cause or 'it was done'})"
        if first is not None:
            did = f"left ({cause})" if cause else "left"
            kind, text = RankFailedError, f"{first.message.partition(_BECAUSE)[0]}{_BECAUSE}{who} {did}"
            ranks = first.ranks
        return kind(f"{text} {when} in group {self.name!r}", ranks=ranks, op=when.split(" ")[1], group=self.name)

    def _describe(self, rank: int) -> str:
        """Return a rank, which need not be a member, as errors name it."""
        member = self._members.get(rank)
        ranks, others = self.ranks, self.engine.wait_graph.numbers
        number = self.global_ranks[ranks.index(rank)] if rank in ranks else others.get(rank, rank)
        return member.described(number) if member is not None else f"rank {number}"


def _decode_failure(payload: bytes) -> DistError:
    try:
        return from_frame(json_text.loads(payload))
    except (ValueError, KeyError, TypeError, AttributeError):
        return GroupAbortedError("another member gave the group up, with a message that cannot be read")
