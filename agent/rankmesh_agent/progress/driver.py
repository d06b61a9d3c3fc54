"""Driving of the progress engine: one of the threads that wait, or else a background thread, moves the bytes of all.

A thread that waits *drives* the engine: it polls all connections, moves bytes both ways and delivers every frame,
whatever group it belongs to. Other threads that wait at the same time block until the driver has moved something; one
of them drives when the driver has finished. So a synchronous call needs no hand-off between threads.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.descriptors import log_failure
from rankmesh_agent.progress.framing import FramedConnection, Transfer
from rankmesh_agent.progress.poller import Poller

SLICE_SECONDS = 0.1
"""Maximum duration of one sleep: between two sleeps the deadline is checked."""
_PAUSE_SECONDS = 0.1
"""Pause of the background thread after an error."""
_GRACE_SECONDS = 0.001
"""Seconds without a call of the foreground after which the background thread begins to drive."""


class Driver(ABC):
    """The part of the progress engine that decides which thread drives it.

    Args:
        connections: the connections to poll.
        oversubscribed: see Poller.

    Attributes:
        lock: the engine's lock.
        calls: number of calls of the foreground so far.
        polls: number of polls so far.
        driven: whether a thread drives the engine.
        closed: whether the engine is closed.
    """

    def __init__(self, connections: Collection[FramedConnection], oversubscribed: bool) -> None:
        # Reentrant because an RLock knows its owner, which a wait interrupted by Ctrl-C needs.
        self.lock = threading.RLock()
        self.calls = 0
        self.polls = 0
        self.driven = False
        self.closed = False
        self._changed = threading.Condition(self.lock)
        self._followers = 0
        self._poller = Poller(self.lock, connections, oversubscribed)
        self._background = ProgressThread(self)

    @abstractmethod
    def poll_once(self, timeout: float) -> None:
        """Sleep until a connection is ready, at most ``timeout`` seconds, and move its bytes. With the lock held."""

    # Without the lock

    def foreground(self) -> threading.RLock:
        """Return the lock, for a caller that begins messages: the background thread stays away for a while."""
        self.calls += 1  # before the lock is taken: the background thread, if it drives, then releases it
        return self.lock

    def wait(self, ready: Callable[[], bool], deadline: Deadline) -> bool:
        """Wait until ``ready()``, which is called with the lock held, moving bytes meanwhile.

        Returns:
            Whether it became true before the deadline.
        """
        self.calls += 1  # see foreground
        with self.lock:
            while not ready():
                if time.monotonic() >= deadline.at or self.closed:
                    return False
                if self.driven:
                    self._wait_for_driver(deadline)
                else:
                    self.drive(ready, deadline)
            return True

    def progress(self) -> None:
        """Move the bytes that can be moved now, without waiting."""
        with self.foreground():
            if not self.driven and not self.closed:
                self.poll_once(0)

    # With the lock held

    def drive(self, done: Callable[[], bool], deadline: Deadline) -> None:
        """Move bytes until ``done()``, or until the deadline. By one thread at a time."""
        self.driven = True
        end = deadline.at
        try:
            while not done() and not self.closed:
                remaining = end - time.monotonic()
                if remaining <= 0:
                    return
                self.poll_once(remaining if remaining < SLICE_SECONDS else SLICE_SECONDS)
        finally:
            self.driven = False
            if not self._background.driving:
                self.calls += 1  # a thread that has waited often calls again at once
            if self._followers or self.closed:
                self._changed.notify_all()
            if self._background.resting:
                self._background.on_driver_left()

    def _wait_for_driver(self, deadline: Deadline) -> None:
        """Wait until the driver has moved something, or stops."""
        self._followers += 1
        try:
            if self._background.driving:
                self._poller.wake()
            self._changed.wait(min(SLICE_SECONDS, deadline.remaining()))
        finally:
            self._followers -= 1


class ProgressThread:
    """Drives the engine in a thread of its own while asynchronous messages are outstanding.

    The thread yields to the foreground, and stays away while the foreground calls again and again: two threads that
    alternate on the lock and the interpreter at every message are slower than one.

    Args:
        engine: the progress engine.

    Attributes:
        driving: whether this thread drives the engine now.
        resting: whether this thread sleeps until it is needed.
    """

    def __init__(self, engine: Driver) -> None:
        self.driving = False
        self.resting = False
        self._engine = engine
        self._needed = threading.Condition(engine.lock)
        self._outstanding: list[tuple[int, Transfer]] = []
        self._thread: threading.Thread | None = None

    # With the engine's lock held

    def add(self, group: int, transfer: Transfer) -> None:
        """Make progress on an asynchronous message until it is done."""
        self._outstanding.append((group, transfer))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rankmesh-progress", daemon=True)
            self._thread.start()
        elif self.resting:
            self.resting = False
            self._needed.notify()

    def drop_group(self, group: int) -> None:
        """Forget the messages of a group."""
        self._outstanding = [entry for entry in self._outstanding if entry[0] != group]

    def on_driver_left(self) -> None:
        """Take over if a thread of the foreground has stopped driving."""
        if self.resting and self._outstanding:
            self._needed.notify()

    def on_closed(self) -> threading.Thread | None:
        """End the thread; return it, to be joined without the lock."""
        self._needed.notify()
        return self._thread

    def _idle(self) -> bool:
        """Return whether no asynchronous message is outstanding."""
        if self._outstanding:
            self._outstanding = [entry for entry in self._outstanding if not entry[1].done]
        return not self._outstanding

    def _run(self) -> None:
        engine = self._engine
        calls = -1

        def done() -> bool:
            return engine.calls != calls or self._idle()

        with engine.lock:
            while not engine.closed:
                try:
                    if self._idle():
                        self._rest(None)
                    elif engine.calls != calls:
                        calls, polls = engine.calls, engine.polls
                        self._needed.wait(_GRACE_SECONDS)
                        if engine.polls == polls and engine.calls != calls and not engine.driven and not engine.closed:
                            engine.poll_once(0)  # the foreground only begins messages and moves no bytes
                    elif engine.driven:
                        self._rest(SLICE_SECONDS)  # a long wait of the foreground; its end calls on_driver_left
                    else:
                        self.driving = True
                        try:
                            engine.drive(done, Deadline(SLICE_SECONDS))
                        finally:
                            self.driving = False
                except Exception as error:  # the messages have deadlines of their own
                    log_failure("asynchronous messages make no progress", error)
                    self._needed.wait(_PAUSE_SECONDS)

    def _rest(self, seconds: float | None) -> None:
        self.resting = True
        try:
            self._needed.wait(seconds)
        finally:
            self.resting = False
