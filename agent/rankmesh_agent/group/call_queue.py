"""The order of a group's calls at one rank: one sequence number, one turn, one queue.

A synchronous call with nothing queued runs in the caller's thread; asynchronous calls, and synchronous ones behind
them, go through one worker thread, made when it is first needed.
"""

from __future__ import annotations

import itertools
import queue
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple, Protocol

from rankmesh_agent.backends.base import Backend, CallContext
from rankmesh_agent.collectives.select import Algorithm
from rankmesh_agent.group.coalescing import BatchedWork, RecordedCall
from rankmesh_agent.group.flight_recorder import FlightRecorder, OpStats, Record, RecordOwner, error_text
from rankmesh_agent.group.pending import Details, OnComplete
from rankmesh_agent.group.work import QueuedWork, Work
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.wire.errors import CollectiveMismatchError, DistError
from rankmesh_agent.wire.ops import Call, OpType
from rankmesh_agent.wire.stats import BOUNDS

_PLANS = 1024
_HOST_FIELDS = 7
"""Fields of a call's key on arrays in host memory; the eighth says where they are instead."""
_WORKER_SECONDS = 5.0
"""How long closing waits for the call under way, which the failure ends, and its callbacks."""


class Plan(NamedTuple):
    """How a call is carried out.

    Attributes:
        call: what it is.
        algorithm: what does it.
        tally: where it is counted.
        nbytes: of its largest contribution, None where that is every rank's own affair.
        backend: what runs the algorithm.
    """

    call: Call
    algorithm: Algorithm
    stats: OpStats
    nbytes: int | None
    backend: Backend

    def payload_bytes(self, arguments: Sequence[Any]) -> int:
        """Return the bytes of a call with these arguments, whose last is what this rank gives in an all_to_all."""
        return sum(array.nbytes for array in arguments[-1]) if self.nbytes is None else self.nbytes


@dataclass(slots=True)
class _QueuedCall:
    """A call in the queue: what, since when, its bytes, and whether its turn has come."""

    call: Call
    since: float
    nbytes: int
    turn: bool = False


class Options(NamedTuple):
    """How a call is to be made, whatever it does.

    Attributes:
        timeout: seconds it may take.
        async_op: return at once.
        user: the user's arrays, for Work.result().
        after: what to do once the data is there.
        note: what to say of it when the ranks' calls do not fit together.
        deadline: by when a queued call has to be over, however late its turn comes; instead of ``timeout``.
    """

    timeout: float
    async_op: bool = False
    result: list[Any] = []  # noqa: RUF012  # never changed
    on_complete: OnComplete = None
    details: Details = None
    deadline: Deadline | None = None


class GroupState(RecordOwner, Protocol):
    """What the calls of a group stand on: whether the group can go on.

    Attributes:
        seq: the number of the latest call.
        begun: when it began, by the monotonic clock; None when it has ended.
    """

    seq: int
    started_at: float | None

    @property
    def recorder(self) -> FlightRecorder:
        """What remembers the calls."""

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held while a call is queued; who ends the group holds it, too."""

    @property
    def failure(self) -> DistError | None:
        """The first failure, None while the group can go on."""

    def active_record(self) -> Record | None:
        """Return the latest call if it is under way. For any thread."""

    def raise_if_failed(self) -> None:
        """Raise the first failure, if there was one. Without the lock: the members may have to be told."""

    def abort(self, error: BaseException) -> None:
        """End the group because of an error here, and tell the members unless they know."""


class Running(CallContext, Protocol):
    """The calls of a group, one after the other, as the backend sees them."""

    def begin(self, call: Call, seq: int, nbytes: int, seconds: float, note: Details = None) -> float:
        """Go on to another call; see waits.RunningCall."""


class CallQueue:
    """One rank's calls in a group, one after the other.

    Args:
        standing: whether the group can go on.
        running: the call under way.
        name: the group's name, for the worker thread's.
        backend: what carries the calls out; ``use`` changes it.

    Attributes:
        backend: see above.
        device: what carries out the calls on arrays that are not in host memory; ``use_for_devices`` sets it.
    """

    def __init__(self, standing: GroupState, running: Running, name: str, backend: Backend) -> None:
        self.backend = backend
        self.device: Backend | None = None
        self._state = standing
        self._active = running
        self._name = name
        self._record = standing.recorder.record
        self._plans: dict[Any, Plan] = {}
        self._op_stats: dict[str, OpStats] = {}
        self._turn = threading.Lock()
        self._queue: queue.SimpleQueue[QueuedWork | None] = queue.SimpleQueue()
        self._queued: deque[_QueuedCall] = deque()
        self._worker: threading.Thread | None = None  # carries out what is queued
        self._latest: threading.Thread | None = None  # the one that did so last; may be let go of, for its callbacks
        self._batch: list[RecordedCall] | None = None
        self._batcher: threading.Thread | None = None

    def use_backend(self, backend: Backend) -> None:
        """Carry calls out by another backend from now on, or by one that has learned something; none is under way."""
        self.backend = backend
        self._plans.clear()

    def use_device_backend(self, backend: Backend) -> None:
        """Carry calls on arrays that are not in host memory out by a backend from now on."""
        self.device = backend

    def submit(self, key: tuple[Any, ...], arguments: Sequence[Any], options: Options) -> Work | None:
        """Make a call: now, or behind the others in the queue.

        Args:
            key: the fields of its Call, equal at all ranks.
            arguments: what the algorithm takes.
            options: how.
        """
        if self._batch is not None and self.batching and len(key) <= _HOST_FIELDS:
            self._batch.append(RecordedCall(key, arguments, options.result, options.on_complete, options.details))
            return BatchedWork() if options.async_op else None
        if not options.async_op:
            if self._worker is not None and threading.current_thread() is self._worker:
                name = self._plan(key).call.name
                raise RuntimeError(f"a synchronous {name} in a callback would wait for itself: use async_op=True there")
            if not self._queued and self._turn.acquire(False):
                try:
                    self._run(key, arguments, options)
                finally:
                    self._turn.release()
                return None
        work = self._enqueue(key, arguments, options)
        if options.async_op:
            return work
        try:
            work.wait()
        except KeyboardInterrupt as error:
            self._state.abort(error)  # the worker must not go on with the caller's array
            raise
        return None

    def again(self, key: tuple[Any, ...], arguments: Sequence[Any], options: Options) -> bool:
        """Make a synchronous call whose like was made before, if nothing is in its way; say whether it was made.

        The short way of calls that take a few microseconds, nearly all of which have been made before.
        """
        worker = self._worker
        if (
            self._batch is not None
            or self._queued
            or (worker is not None and threading.current_thread() is worker)
            or not self._turn.acquire(False)
        ):
            return False
        try:
            plan = self._plans.get(key)
            if plan is None:
                return False
            standing = self._state
            if standing.failure is not None:
                standing.raise_if_failed()
            self.execute(plan, arguments, standing.seq + 1, options)
        finally:
            self._turn.release()
        return True

    @property
    def batching(self) -> bool:
        """Whether this thread's calls are being recorded."""
        return self._batch is not None and threading.current_thread() is self._batcher

    def open_batch(self) -> None:
        """Record this thread's calls from now on.

        Raises:
            RuntimeError: a batch is open.
        """
        if self._batch is not None:
            raise RuntimeError(f"a batch is already open for group {self._name!r}; batches of a group do not nest")
        self._batch, self._batcher = [], threading.current_thread()

    def close_batch(self) -> list[RecordedCall]:
        """Record no more; return what was recorded, to be submitted or forgotten."""
        recorded, self._batch, self._batcher = self._batch or [], None, None
        return recorded

    def plan(self, call: Call, algorithm: Algorithm) -> Plan:
        """Return that a call is carried out by an algorithm."""
        tally = self._op_stats.setdefault(call.name, OpStats())
        nbytes = None if call.kind is OpType.ALL_TO_ALL else call.nbytes
        return Plan(call, algorithm, tally, nbytes, self._carrier(call))

    def op_stats(self) -> Mapping[str, OpStats]:
        """Return what has been counted of the calls, by kind. For any thread."""
        return self._op_stats.copy()

    def active_records(self) -> list[Record]:
        """Return the calls that have been made and not ended: one that runs, then the queued ones. For any thread."""
        standing = self._state
        queued, running = self._queued.copy(), standing.active_record()
        seqs = itertools.count(standing.seq + 1)
        waiting = [(each.call, next(seqs), each.since, each.nbytes) for each in queued if not each.turn]
        return ([] if running is None else [running]) + [
            (standing, call, seq, since, None, "", nbytes) for call, seq, since, nbytes in waiting
        ]

    def execute(self, plan: Plan, arguments: Sequence[Any], seq: int, options: Options) -> None:
        """Make call number ``seq`` in this thread, whose turn it is; an error half-way ends the group.

        Raises:
            CollectiveMismatchError: nothing has moved and everyone knows: the group goes on.
        """
        call, algorithm, tally, nbytes, backend = plan
        if nbytes is None:
            nbytes = plan.payload_bytes(arguments)
        standing, running = self._state, self._active
        error_said = ""
        begun = running.begin(call, seq, nbytes, options.timeout, options.details)
        try:
            try:
                backend.run(algorithm, arguments, running)
            except CollectiveMismatchError:
                raise
            except BaseException as error:
                standing.abort(error)
                raise
            if options.on_complete is not None:
                options.on_complete()
        except BaseException as error:
            error_said = error_text(error)
            tally.failures += 1
            raise
        finally:
            # Written out here what Tally.count does: calling it would take longer than doing it.
            ended = monotonic()
            seconds = ended - begun
            tally.seconds += seconds
            tally.nbytes += nbytes
            tally.buckets[bisect_left(BOUNDS, seconds)] += 1
            standing.started_at = None
            self._record((standing, call, seq, begun, ended, error_said, nbytes))

    def close(self) -> None:
        """End the worker; the group has failed by now, so what is queued fails."""
        if self._latest is not None:
            self._queue.put(None)
            if self._latest is not threading.current_thread():
                self._latest.join(_WORKER_SECONDS)
        if self.device is not None:
            self.device.close()
        self.backend.close()

    def _plan(self, key: tuple[Any, ...]) -> Plan:
        """Return what is to be done, or raise why it cannot be."""
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            call = Call(*key)
            plan = self._plans[key] = self.plan(call, self._carrier(call).algorithm(call))
        return plan

    def _carrier(self, call: Call) -> Backend:
        return self.device if call.place and self.device is not None else self.backend

    def _enqueue(self, key: tuple[Any, ...], arguments: Sequence[Any], options: Options) -> QueuedWork:
        plan = self._plan(key)
        queued = _QueuedCall(plan.call, monotonic(), plan.payload_bytes(arguments))

        def run() -> None:
            with self._turn:
                queued.turn = True
                if work.claim():
                    until = options.deadline
                    how = options if until is None else options._replace(timeout=until.remaining())
                    self._run(key, arguments, how)

        work = QueuedWork(run, options.result, plan.call.name, lambda: self._worker, self._release)
        with self._state.lock:  # close() takes it, too: nothing is queued behind its end mark
            going = self._state.failure is None
            if going:
                self._queued.append(queued)
                if self._worker is None:
                    name = f"rankmesh-{self._name}"
                    self._worker = self._latest = threading.Thread(target=self._work, name=name, daemon=True)
                    self._worker.start()
                self._queue.put(work)
        if not going:
            self._state.raise_if_failed()
        return work

    def _work(self) -> None:
        me = threading.current_thread()
        while (work := self._queue.get()) is not None:
            work.run(self._queued.popleft)
            del work  # what it has of the user's goes now, not when the next one comes
            if self._worker is not me:
                with self._state.lock:
                    self._worker = self._worker or me
                if self._worker is not me:
                    return  # another one was made while this one was let go of

    def _release(self) -> bool:
        """Let the worker go, which is this thread, if nothing is queued; say whether it holds nothing up."""
        with self._state.lock:
            if threading.current_thread() is self._worker and not self._queued:
                self._worker = None
            return threading.current_thread() is not self._worker

    def _run(self, key: tuple[Any, ...], arguments: Sequence[Any], options: Options) -> None:
        # In turn: what an earlier call changed (registered arrays, another backend) holds for this one at every rank.
        plan = self._plans.get(key) or self._plan(key)
        standing = self._state
        if standing.failure is not None:
            standing.raise_if_failed()
        self.execute(plan, arguments, standing.seq + 1, options)
