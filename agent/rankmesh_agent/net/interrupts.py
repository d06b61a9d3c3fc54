"""Deferral of Ctrl-C during what must be done in whole: a process is started, or peers are informed of a failure.

Python raises KeyboardInterrupt between any two bytecodes of the main thread: possibly after a process has started but
before it is recorded, in an after-fork hook, where the exception is printed and lost, or, at a second Ctrl-C, in the
GOODBYE that the first one causes.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_deliver: Callable[[], None] | None = None
"""Ends the deferral and delivers a recorded interrupt; None while nothing is deferred."""


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defer SIGINT to the end of the block. No effect in threads other than the main one."""
    global _deliver
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler) or _deliver is not None:
        yield
        return
    frames: list[FrameType | None] = []

    def record(number: int, frame: FrameType | None) -> None:
        frames.append(frame)

    def deliver() -> None:
        global _deliver
        _deliver = None
        signal.signal(signal.SIGINT, handler)
        if frames:
            handler(signal.SIGINT, frames[0])

    signal.signal(signal.SIGINT, record)
    _deliver = deliver
    try:
        yield
    finally:
        deliver()


def deliver_interrupts() -> None:
    """Stop deferring in a process that was forked inside such a block."""
    if _deliver is not None:
        _deliver()
