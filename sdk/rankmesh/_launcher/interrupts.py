"""Ctrl-C while processes are being started: it waits until they are known, and is lost nowhere.

Python raises KeyboardInterrupt between any two steps of the main thread: when a process runs already that nobody has
noted yet, or in a function that runs after a fork, where it is printed and forgotten.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], object]


class _Held:
    """Ctrl-C, put off."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._frames: list[FrameType | None] = []

    def note(self, number: int, frame: FrameType | None) -> None:
        self._frames.append(frame)

    def end(self) -> None:
        """Let Ctrl-C through again, and what came."""
        signal.signal(signal.SIGINT, self._handler)
        if self._frames:
            self._handler(signal.SIGINT, self._frames[0])


_held: _Held | None = None


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Put Ctrl-C off to the end of the block. Does nothing in threads that it does not reach."""
    global _held
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler) or _held is not None:
        yield
        return
    held = _Held(handler)
    signal.signal(signal.SIGINT, held.note)
    _held = held
    try:
        yield
    finally:
        _held = None
        held.end()


def let_interrupts_through() -> None:
    """In a process forked in such a block: Ctrl-C is this one's own from now on."""
    global _held
    held, _held = _held, None
    if held is not None:
        held.end()
