"""Streams and events.

A stream is a queue with a thread that does what is put into it, in order and later: after a pause now and then, whose
lengths follow from a seed. What nothing orders runs in an order that nobody expects.
"""

from __future__ import annotations

import collections
import itertools
import os
import queue
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from cupy._gpus import GPUS, CUDARuntimeError, Gpu, gpu, touch

_DELAY = float(os.environ.get("CUDA_DOUBLE_DELAY", "0.002"))
"""The longest pause, in seconds."""
_SEED = os.environ.get("CUDA_DOUBLE_SEED", "0")
_PAUSED = 0.25
"""How much of the work a pause comes before."""
_PENDING = 511
"""How many records of an event can be on their way."""

_submitting = threading.RLock()
_numbers = itertools.count()
_failed: list[CUDARuntimeError] = []

given_back: collections.deque[Callable[[], object]] = collections.deque()
"""What is to be done before the next work is enqueued; for the garbage collector, which may come at any moment."""


def tidy() -> None:
    """Do what was given back."""
    while given_back:
        try:
            done = given_back.popleft()
        except IndexError:  # another thread was faster
            return
        done()


class Mark(NamedTuple):
    """The end of some work in a queue."""

    queue: Queue
    number: int

    @property
    def reached(self) -> bool:
        return self.queue.done >= self.number

    def wait(self) -> None:
        with self.queue.changed:
            self.queue.changed.wait_for(lambda: self.reached)


class Queue:
    """A stream.

    Args:
        owner: its GPU.
        blocking: whether it waits for the legacy default stream, which waits for it.

    Attributes:
        done: how much work has ended.
    """

    def __init__(self, owner: Gpu, blocking: bool) -> None:
        self.gpu = owner
        self.blocking = blocking
        self.closed = False
        self.changed = threading.Condition()
        self.done = 0
        self._put = 0
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        number = next(_numbers)
        self._random = random.Random(f"{_SEED}-{number}")
        owner.queues[:] = [other for other in owner.queues if not other.closed or not other.tail.reached] + [self]
        threading.Thread(target=self._run, name=f"cuda-double-{number}", daemon=True).start()

    @property
    def tail(self) -> Mark:
        """The end of all that is enqueued."""
        return Mark(self, self._put)

    def enqueue(self, work: Callable[[], object], after: Iterable[Mark] = ()) -> Mark:
        """Have work done later.

        Args:
            work: what to do, without a reference to what it works on, as on a GPU.
            after: what has to have ended before.
        """
        touch()
        tidy()
        raise_failure()
        with _submitting:
            return self.put(work, [*after, *self._implied()])

    def put(self, work: Callable[[], object], after: Iterable[Mark] = ()) -> Mark:
        """See enqueue; the legacy default stream counts for nothing."""
        with _submitting:
            self._put += 1
            self._work.put((work, [mark for mark in after if not mark.reached]))
            return self.tail

    def close(self) -> None:
        """Let the thread end after what is enqueued."""
        self.closed = True
        self._work.put(None)

    def _implied(self) -> list[Mark]:
        default = self.gpu.queues[0]
        if self is default:
            return [other.tail for other in self.gpu.queues if other.blocking and other is not self]
        return [default.tail] if self.blocking else []

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            work, waits = item
            for mark in waits:
                mark.wait()
            if self._random.random() < _PAUSED:
                time.sleep(self._random.random() * _DELAY)
            try:
                work()
            except Exception as error:
                print(f"{work.__qualname__} on a stream failed:\n{traceback.format_exc()}", file=sys.stderr)
                _failed.append(error if isinstance(error, CUDARuntimeError) else CUDARuntimeError(719))
            del item, work, waits
            with self.changed:
                self.done += 1
                self.changed.notify_all()


def raise_failure() -> None:
    """Raise the error of the first work that failed: after one, all that is asked of CUDA fails."""
    if _failed:
        raise CUDARuntimeError(failure())


def failure() -> int:
    """Return the number of the error that raise_failure raises, 0 if none."""
    return _failed[0].status if _failed else 0


for _gpu in GPUS:
    Queue(_gpu, True)

_streams: dict[int, Queue] = {}
_events: dict[int, Event] = {}
_pointers = itertools.count(0x5000_0000_0000, 0x100)


def new_stream(blocking: bool) -> int:
    """Make a stream on the current GPU; return its pointer."""
    touch()
    pointer = next(_pointers)
    _streams[pointer] = Queue(gpu(), blocking)
    return pointer


def stream(pointer: int) -> Queue:
    """Return the stream with a pointer, of which 0 and 1 are the current GPU's legacy default one."""
    if pointer in (0, 1):
        return gpu().queues[0]
    if pointer not in _streams:
        raise CUDARuntimeError(400)
    return _streams[pointer]


def drop_stream(pointer: int) -> None:
    """Let a stream go after what is enqueued on it."""
    stream(pointer).close()
    del _streams[pointer]


class Event:
    """An event: how often it was recorded, and which records have happened.

    Args:
        owner: its GPU.

    Attributes:
        latest: the number of the latest record.
    """

    def __init__(self, owner: Gpu) -> None:
        self.gpu = owner
        self.latest = 0
        self._happened = [0] * _PENDING

    def record(self, where: Queue) -> None:
        """Let it happen when all that is enqueued has ended."""
        with _submitting:
            number = self.latest = self.latest + 1
            where.enqueue(lambda: self._happen(number))

    def reached(self, number: int) -> bool:
        """Whether a record has happened."""
        return self._happened[number % _PENDING] >= number

    def wait(self, number: int) -> None:
        """Return when a record has happened."""
        pause = 0.0001
        while not self.reached(number):
            time.sleep(pause)
            pause = min(pause * 1.5, 0.001)

    def _happen(self, number: int) -> None:
        self._happened[number % _PENDING] = number


def new_event() -> int:
    """Make an event on the current GPU; return its pointer."""
    touch()
    pointer = next(_pointers)
    _events[pointer] = Event(gpu())
    return pointer


def event(pointer: int) -> Event:
    """Return the event with a pointer."""
    if pointer not in _events:
        raise CUDARuntimeError(400)
    return _events[pointer]


def drop_event(pointer: int) -> None:
    """Let an event go; what waits for it goes on waiting."""
    event(pointer)
    del _events[pointer]
