"""Queue of a group's calls at one rank: one sequence number, one call at a time, one plan for each different call.

A synchronous call with an empty queue runs in the caller's thread; asynchronous calls, and synchronous ones behind
them, run in one worker thread, which the first of them starts.
"""

from __future__ import annotations

import itertools
import queue
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple

from rankmesh_agent import native
from rankmesh_agent.backends.base import Backend
from rankmesh_agent.collectives.reduction import check_op
from rankmesh_agent.collectives.select import Algorithm, name_of
from rankmesh_agent.group.flight_recorder import Record, error_text
from rankmesh_agent.group.native_calls import NativeCalls, Submit
from rankmesh_agent.group.options import Options
from rankmesh_agent.group.state import GroupState
from rankmesh_agent.group.work import Future, Work
from rankmesh_agent.net.fork import reset_lock
from rankmesh_agent.wire.errors import CollectiveMismatchError
from rankmesh_agent.wire.ops import Call, OpType, ReduceOp
from rankmesh_agent.wire.stats import BOUNDS, OpStats

_MAX_PLANS = 1024
_JOIN_SECONDS = 5.0
"""Time limit of ``close`` for the worker: the failure ends its call, but a callback may run."""
_PREMULTIPLIED = ReduceOp.PREMUL_SUM


class Plan(NamedTuple):
    """Execution plan of a call; made and validated once for all calls with the same key.

    Attributes:
        nbytes: bytes of its largest contribution, None where each rank's differ.
        native: the plan of the compiled core, None for a call that it does not carry out.
    """

    call: Call
    algorithm: Algorithm
    stats: OpStats
    nbytes: int | None
    backend: Backend
    native: Any = None

    def payload_bytes(self, arguments: Sequence[Any]) -> int:
        """Return the bytes of a call with these arguments; the last of an all_to_all's are this rank's inputs."""
        return sum(array.nbytes for array in arguments[-1]) if self.nbytes is None else self.nbytes


@dataclass(slots=True)
class _QueuedCall:
    """A call in the queue: when it was queued, what executes it in the worker thread, and whether it has begun."""

    call: Call
    since: float
    nbytes: int
    work: Work
    execute: Callable[[], None]
    started: bool = False


class CallQueue:
    """One rank's calls in a group, one after the other.

    Args:
        backend: executes the calls on arrays in host memory; ``use_backend`` installs others.
    """

    def __init__(self, state: GroupState, backend: Backend) -> None:
        self._backends = {backend.device: backend}
        self._state = state
        self._record = state.recorder.record
        self._plans: dict[Any, Plan] = {}
        self._op_stats: dict[str, OpStats] = {}
        self._turn = threading.Lock()
        self._queue: queue.SimpleQueue[_QueuedCall | None] = queue.SimpleQueue()
        self._queued: deque[_QueuedCall] = deque()
        self._native: NativeCalls | None = None
        self.worker: threading.Thread | None = None  # runs the queued calls
        self._latest: threading.Thread | None = None  # the last one that did; `_release` may have let it go

    @property
    def backend(self) -> Backend:
        """The backend for arrays in host memory."""
        return self._backends[""]

    def use_backend(self, backend: Backend) -> None:
        """Execute the calls on a backend's device by that backend from the next call on.

        Also after a change to a backend that affects its choice of algorithms. No call on the device is under way.
        """
        self._backends[backend.device] = backend
        self._plans.clear()
        members = backend.direct if backend.segment is None else backend.segment
        if not backend.device and (self._native is None or members is not self._native.members):
            self._end_native()
            if native.core is not None and members is not None:
                shared = self._plans, self._queued, self._turn
                self._native = NativeCalls(native.core, self, self._state, members, shared)

    @property
    def fastest(self) -> tuple[Submit, Callable[..., bool] | None]:
        """The compiled core's ``submit`` and ``at_once``, where it may carry out calls; else this queue's, and None."""
        return (self.submit, None) if self._native is None else (self._native.submit, self._native.at_once)

    def submit(
        self, key: tuple[Any, ...], arguments: Sequence[Any], options: Options, *, launches: bool = False
    ) -> Work | None:
        """Execute a call now, or queue it behind the others.

        Args:
            key: the fields of its Call, equal at all ranks; a key that was used before has its plan already.
            launches: the call only launches work, on a GPU: also an asynchronous one is executed now, if it is the only
                one.

        Returns:
            The Work of an asynchronous call that is queued.

        Raises:
            TypeError: the reduction is not defined for the dtype.
        """
        if not options.async_op and self.worker is not None and threading.current_thread() is self.worker:
            name = self.plan(key).call.name
            raise RuntimeError(f"a synchronous {name} in a callback would wait for itself: use async_op=True there")
        if (launches or not options.async_op) and not self._queued and self._turn.acquire(False):
            try:
                self.execute(self._plans.get(key) or self.plan(key), arguments, options)
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

    def plan(self, key: tuple[Any, ...], algorithm: Algorithm | None = None) -> Plan:
        """Return the plan of the calls with a key; validate and plan the first of them.

        Args:
            algorithm: executes the call instead of the one that the backend selects; the plan is not kept then.
        """
        plan = self._plans.get(key) if algorithm is None else None
        if plan is None:
            call = Call(*key)
            if call.reduce_op is not None and call.dtype is not None and call.reduce_op is not _PREMULTIPLIED:
                check_op(call.reduce_op, call.dtype)
            backend = self._backends.get(call.place) or self.backend
            stats = self._op_stats.setdefault(call.name, OpStats())
            nbytes = None if call.kind is OpType.ALL_TO_ALL else call.nbytes
            plan = Plan(call, algorithm or backend.algorithm(call), stats, nbytes, backend)
            if algorithm is None:
                if self._native is not None:
                    plan = plan._replace(native=self._native.plan_of(call, plan.algorithm))
                if len(self._plans) >= _MAX_PLANS:
                    self._plans.clear()
                self._plans[key] = plan
        return plan

    def op_stats(self) -> Mapping[str, OpStats]:
        """Return the statistics of the calls, by operation. For any thread."""
        if self._native is None:
            return self._op_stats.copy()
        return self._native.added_to(self._op_stats)

    def active_records(self) -> list[Record]:
        """Return the calls that have not ended: the one under way, then the queued ones. For any thread."""
        state = self._state
        queued, active = self._queued.copy(), state.active_record()
        seqs = itertools.count(state.seq + 1)
        waiting = [(each.call, next(seqs), each.since, each.nbytes) for each in queued if not each.started]
        return ([] if active is None else [active]) + [
            (state, call, seq, since, None, "", nbytes) for call, seq, since, nbytes in waiting
        ]

    def algorithms(self) -> dict[Call, str]:
        """Return the names of the algorithms of the calls that have a plan. For any thread."""
        return {plan.call: name_of(plan.algorithm) for plan in self._plans.copy().values()}

    def execute(
        self,
        plan: Plan,
        arguments: Sequence[Any],
        options: Options,
        seq: int | None = None,
        started: float | None = None,
    ) -> None:
        """Execute a call, by default the next number, in this thread, whose turn it is; an error within ends the group.

        Args:
            started: when the compiled core began it, by the monotonic clock; None for a call that begins now.

        Raises:
            CollectiveMismatchError: no data has moved and all ranks know: the group goes on.
            DistBackendError: the call failed, or the group had failed before; then this is its first failure.
        """
        state = self._state
        if started is None:
            if state.failure is not None:
                state.broadcast_abort()
                state.raise_if_failed()
            started = monotonic()
        call, algorithm, stats, nbytes, backend, _ = plan
        if nbytes is None:
            nbytes = plan.payload_bytes(arguments)
        error_message = ""
        if seq is None:
            seq = state.seq + 1
        state.call = call
        state.seq = seq
        state.nbytes = nbytes
        timeout, _, _, on_complete, state.details, until = options
        deadline = state.deadline
        state.started_at = deadline.started = started
        # Written out here what Deadline.restart does: calling it would take longer than doing it.
        deadline.seconds, deadline.at = (timeout, started + timeout) if until is None else (until.seconds, until.at)
        try:
            try:
                backend.run(algorithm, arguments, state)
            except CollectiveMismatchError:
                raise
            except BaseException as error:
                state.abort(error)
                raise
            if on_complete is not None:
                on_complete()
        except BaseException as error:
            error_message = error_text(error)
            stats.failures += 1
            raise
        finally:
            ended = monotonic()
            seconds = ended - started
            stats.seconds += seconds
            stats.nbytes += nbytes
            stats.buckets[bisect_left(BOUNDS, seconds)] += 1
            state.started_at = None
            self._record((state, call, seq, started, ended, error_message, nbytes))

    def close(self) -> None:
        """End the worker; the group has failed by now, so the queued calls fail."""
        if self._latest is not None:
            self._queue.put(None)
            if self._latest is not threading.current_thread():
                self._latest.join(_JOIN_SECONDS)
        for device in sorted(self._backends, reverse=True):  # host memory last: other backends may build on its backend
            self._backends[device].close()
        self._end_native()

    def _end_native(self) -> None:
        if self._native is not None:
            self._native.close()
            self._op_stats = dict(self.op_stats())
            self._native = None

    def end_in_child(self) -> None:
        """Forget the worker and its calls in a forked child, which has no such thread."""
        reset_lock(self._turn)
        self._queued.clear()
        self.worker = self._latest = None

    def _enqueue(self, key: tuple[Any, ...], arguments: Sequence[Any], options: Options) -> Work:
        plan = self.plan(key)

        def execute() -> None:
            # Planned anew: an earlier call may have changed the backend (registered arrays), at every rank.
            plan = self.plan(key)
            if self._native is None or plan.native is None or not self._native.run(plan, arguments, options):
                self.execute(plan, arguments, options)

        work = Work(plan.call.name, options.result, Future(lambda: self.worker, self._release))
        queued = _QueuedCall(plan.call, monotonic(), plan.payload_bytes(arguments), work, execute)
        with self._state.lock:  # close() takes it, too: no call is queued behind its end mark
            failed = self._state.failure is not None
            if not failed:
                self._queued.append(queued)
                if self.worker is None:
                    name = f"rankmesh-{self._state.name}"
                    self.worker = self._latest = threading.Thread(target=self._work, name=name, daemon=True)
                    self.worker.start()
                self._queue.put(queued)
        if failed:
            self._state.broadcast_abort()
            self._state.raise_if_failed()
        return work

    def _work(self) -> None:
        me = threading.current_thread()
        while (queued := self._queue.get()) is not None:
            self._run(queued)
            del queued  # releases the user's arrays now, not when the next call comes
            if self.worker is not me:
                with self._state.lock:
                    self.worker = self.worker or me
                if self.worker is not me:
                    return  # another worker was started while a callback held this one

    def _run(self, queued: _QueuedCall) -> None:
        """Execute a call in the worker thread, unless it was withdrawn; it leaves the queue before its callbacks."""
        work = queued.work
        try:
            with self._turn:
                queued.started = True
                if work.claim():
                    queued.execute()
        except BaseException as error:
            self._queued.popleft()
            work.end(error)
        else:
            self._queued.popleft()
            work.end(None)

    def _release(self) -> bool:
        """Let this thread, the worker, go if the queue is empty; return whether the thread holds up no call."""
        with self._state.lock:
            if threading.current_thread() is self.worker and not self._queued:
                self.worker = None
            return threading.current_thread() is not self.worker
