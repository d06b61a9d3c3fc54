"""Progress of asynchronous messages: a background thread that drives the engine while no other thread does."""

from __future__ import annotations

import threading
from collections.abc import Container
from typing import TYPE_CHECKING

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.descriptors import log_failure
from rankmesh_agent.progress.framing import Transfer

if TYPE_CHECKING:
    from rankmesh_agent.progress.engine import ProgressEngine

SLICE_SECONDS = 0.1
"""Maximum duration of one sleep: between two sleeps the deadline is checked."""
_PAUSE_SECONDS = 0.1
_GRACE_SECONDS = 0.001
"""Seconds without a call of the foreground after which the background thread begins to drive."""


class ProgressThread:
    """Drives the engine in a thread of its own while asynchronous messages are outstanding.

    The thread yields to the foreground, and stays away while the foreground calls again and again: two threads that
    alternate on the lock and the interpreter at every message are slower than one.

    Attributes:
        driving: whether this thread drives the engine now.
        resting: whether this thread sleeps until it is needed.
    """

    def __init__(self, engine: ProgressEngine, sinks: Container[tuple[int, int]]) -> None:
        self.driving = False
        self.resting = False
        self._engine = engine
        self._needed = threading.Condition(engine.lock)
        self._sinks = sinks
        self._outstanding: list[tuple[int, Transfer]] = []
        self._thread: threading.Thread | None = None

    # With the engine's lock held

    def add(self, group: int, transfer: Transfer) -> None:
        """Make progress on an asynchronous message until it is done, or its group has ended."""
        self._outstanding.append((group, transfer))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rankmesh-progress", daemon=True)
            self._thread.start()
        elif self.resting:
            self.resting = False
            self._needed.notify()

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
            epoch, sinks = self._engine.epoch, self._sinks
            self._outstanding = [
                (group, transfer)
                for group, transfer in self._outstanding
                if not transfer.done and (epoch, group) in sinks
            ]
        return not self._outstanding

    def _run(self) -> None:
        engine = self._engine
        calls = -1

        def done() -> bool:
            return engine.call_count != calls or self._idle()

        with engine.lock:
            while not engine.closed:
                try:
                    if self._idle():
                        self._rest(None)
                    elif engine.call_count != calls:
                        calls, polls = engine.call_count, engine.poll_count
                        self._needed.wait(_GRACE_SECONDS)
                        idle = engine.poll_count == polls and not engine.driven and not engine.closed
                        if idle and engine.call_count != calls:
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
