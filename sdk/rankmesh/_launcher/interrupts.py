"""Deferral of Ctrl-C while processes are started.

Python raises KeyboardInterrupt between any two bytecodes of the main thread: possibly after a process has started but
before it is recorded, or in an after-fork hook, where the exception is printed and lost.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], object]


class _DeferredInterrupt:
    """A SIGINT handler that records the signal for later."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._frames: list[FrameType | None] = []

    def record(self, number: int, frame: FrameType | None) -> None:
        self._frames.append(frame)

    def deliver(self) -> None:
        """Restore the handler, and call it if a signal was recorded."""
        signal.signal(signal.SIGINT, self._handler)
        if self._frames:
            self._handler(signal.SIGINT, self._frames[0])


_deferred: _DeferredInterrupt | None = None


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defer SIGINT to the end of the block. No effect in threads other than the main one."""
    global _deferred
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler) or _deferred is not None:
        yield
        return
    held = _DeferredInterrupt(handler)
    signal.signal(signal.SIGINT, held.record)
    _deferred = held
    try:
        yield
    finally:
        _deferred = None
        held.deliver()


def deliver_interrupts() -> None:
    """Stop deferring in a process that was forked inside such a block."""
    global _deferred
    held, _deferred = _deferred, None
    if held is not None:
        held.deliver()
