"""The calls that a GPU has not carried out yet: who notices that one cannot be, and ends it.

A kernel of NCCL's waits on the GPU for those of the other ranks, for ever if one does not come. So a thread looks at
what is under way: when the group fails, or a call is not over in time, it aborts the engine, which ends its kernels,
and what waits behind them on a stream goes on.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from rankmesh_agent.gpu.launch import Launch
from rankmesh_agent.gpu.store_exchange import StoreExchange
from rankmesh_agent.group.work import Future
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.wire.errors import CollectiveTimeoutError, DistBackendError, DistError

_SECONDS = 0.005
"""How often the thread looks while calls are under way."""
_CLOSE_SECONDS = 5.0
"""How long closing waits for the thread, which may be at an abort that takes its time."""
_SLOW_SECONDS = 1.0
"""How long a call is under way when its rank tells the others so: who has not told that when it is over is missing."""


class Engine(Protocol):
    """What has to be ended when a call cannot be carried out."""

    def async_error(self) -> str:
        """Return what the engine itself knows to be wrong, nothing if all is well."""

    def abort(self) -> None:
        """End the kernels under way; no call can be made any more. Does nothing the second time."""


class GpuWatchdog:
    """Looks after a group's calls on GPUs.

    Args:
        name: the group's, for people.
        engine: see above.
        exchange: where a rank says that a call takes long, and learns which others say so.
        size: ranks in the group.
        numbers: returns the numbers the user knows the members by.
        failure: returns the group's first failure, None while it can go on.
        gone: returns the error of some group ranks of which one has left, None if all are there.
        give_up: ends the group at all members because of an error.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        exchange: StoreExchange,
        size: int,
        numbers: Callable[[], tuple[int, ...]],
        failure: Callable[[], DistError | None],
        gone: Callable[[Sequence[int], str], DistError | None],
        give_up: Callable[[BaseException], None],
    ) -> None:
        self._name = name
        self._engine = engine
        self._exchange = exchange
        self._size = size
        self._numbers = numbers
        self._failure = failure
        self._gone = gone
        self._give_up = give_up
        self._launches: list[Launch] = []
        self._count = 0
        self._slow = 0
        self._numbered: dict[Launch, int] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, launch: Launch, *, collective: bool) -> None:
        """Look after a call that is being launched; collective ones are so by all members, in one order."""
        with self._changed:
            if collective:
                self._count += 1
                self._numbered[launch] = self._count
            self._launches.append(launch)
            if self._thread is None:
                name = f"rankmesh-{self._name}-gpu"
                self._thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._thread.start()
            if len(self._launches) == 1:
                self._changed.notify_all()

    def remove(self, launch: Launch) -> None:
        """Look after a call no more: it could not be launched."""
        with self._changed:
            if launch in self._launches:
                self._launches.remove(launch)
                self._numbered.pop(launch, None)
                self._changed.notify_all()

    def future_of(self, launch: Launch) -> Future:
        """Return what is complete when a call has ended, its value None."""
        with self._changed:
            if launch.future is not None:
                return launch.future
            launch.future = Future()
            over = launch not in self._launches and launch.is_completed()
        if over:
            _complete(launch.future, launch)
        return launch.future

    def drain(self, deadline: Deadline) -> None:
        """Wait until all calls have ended, or the deadline passes: they have their own, which is looked after.

        Raises:
            DistError: one failed.
        """
        with self._changed:
            while self._launches and not deadline.expired():
                self._changed.wait(_SECONDS)
        failure = self._failure()
        if failure is not None:
            raise failure

    def close(self) -> bool:
        """End the thread; what is under way is looked after no more. Return whether something is."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)
        return bool(self._launches)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._launches and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                launches = self._launches.copy()
            try:
                self._look(launches)
            except Exception as error:  # CUDA's: nothing more is to be had of the GPU. Or a fault of ours
                failure = error if isinstance(error, DistError) else DistBackendError(f"on the GPU: {error}")
                self._give_up(failure)
                self._abort(failure)
            with self._changed:
                if self._launches and not self._closed:
                    self._changed.wait(_SECONDS)

    def _look(self, launches: list[Launch]) -> None:
        error = self._failure()
        busy: set[int] = set()
        for launch in launches:
            if launch.stream in busy:
                continue  # behind one that has not ended
            if launch.is_completed():
                self._ended(launch)
            else:
                busy.add(launch.stream)
        now = time.monotonic()
        late = next((launch for launch in launches if now >= launch.deadline.at and not launch.is_completed()), None)
        if error is None:
            trouble = self._engine.async_error()
            if trouble:
                error = DistBackendError(f"{launches[0].description} in group {self._name!r}: {trouble}")
            elif late is not None:
                error = self._late(late)
            else:
                with contextlib.suppress(DistError):  # the store's rank is gone: who that is shows soon
                    self._tell_if_slow()
                error = self._left(launches)
                if error is None:
                    return
            self._give_up(error)
        self._abort(error)

    def _abort(self, error: DistError) -> None:
        with contextlib.suppress(Exception):  # it is of no use any more, whatever it says
            self._engine.abort()
        with self._changed:
            launches = self._launches.copy()
        for launch in launches:
            launch.fail(error)
            self._ended(launch)

    def _ended(self, launch: Launch) -> None:
        with self._changed:
            if launch not in self._launches:
                return
            self._launches.remove(launch)
            self._numbered.pop(launch, None)
            self._changed.notify_all()
            future = launch.future
        if future is not None:
            _complete(future, launch)

    def _left(self, launches: list[Launch]) -> DistError | None:
        """Return the error of a call that takes long, and waits for a rank that has left."""
        for launch in launches:
            if launch.deadline.elapsed() > _SLOW_SECONDS and not launch.is_completed():
                return self._gone(launch.peers, launch.description.partition("(")[0])
        return None

    def _tell_if_slow(self) -> None:
        """Say that a call is under way for long, once."""
        with self._changed:
            first = self._launches[0] if self._launches else None
            number = 0 if first is None else self._numbered.get(first, 0)
        if first is None or number <= self._slow:
            return
        if first.deadline.elapsed() > min(_SLOW_SECONDS, first.deadline.seconds / 2):
            self._slow = number
            self._exchange.publish("slow", f"{number} {first.description}".encode())

    def _late(self, launch: Launch) -> CollectiveTimeoutError:
        """Return the error of a call that is not over in time: who did not make it, as far as that is known."""
        number = self._numbered.get(launch, 0)
        told: list[bytes | None] = [None] * self._size
        with contextlib.suppress(DistError):
            told = [self._exchange.peek("slow", rank) for rank in range(self._size)]
        said = [(0, "") if each is None else _read(each) for each in told]
        numbers = self._numbers()
        missing = [numbers[rank] for rank, (at, _) in enumerate(said) if at < number]
        others = {numbers[rank]: call for rank, (at, call) in enumerate(said) if number and at == number}
        seconds = f"{launch.deadline.seconds:.1f} s"
        words = f"{launch.description} in group {self._name!r} did not end on the GPU within {seconds}"
        if len(set(others.values())) > 1:
            words += "; the ranks did not make the same call: " + "; ".join(
                f"rank {rank}: {call}" for rank, call in others.items()
            )
        if missing:
            words += f"; not there: {', '.join(f'rank {rank}' for rank in missing)}"
        return CollectiveTimeoutError(words, ranks=missing, op=launch.description.partition("(")[0], group=self._name)


def _complete(future: Future, launch: Launch) -> None:
    if launch.error is None:
        future.set_result(None)
    else:
        future.set_exception(launch.error)


def _read(told: bytes) -> tuple[int, str]:
    number, _, call = told.decode(errors="replace").partition(" ")
    return int(number), call
