"""Deferral of Ctrl-C during what must be done in whole: a process is started, or peers are informed of a failure.

Python raises KeyboardInterrupt between any two bytecodes of the main thread: possibly after a process has started but
before it is recorded, in an after-fork hook, where the exception is printed and lost, or, at a second Ctrl-C, in the
GOODBYE that the first one causes.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]  # without the enums of signal, whose look-up takes 5 µs
import threading
from types import FrameType

_active: interrupts_deferred | None = None
"""The block that defers interrupts now."""


class interrupts_deferred:  # noqa: N801  # as contextlib's
    """Context manager that defers SIGINT to the end of its block. No effect in threads other than the main one."""

    def __enter__(self) -> None:
        global _active
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(handler) and _active is None:
            self._handler = handler
            self._frames: list[FrameType | None] = []
            signal.signal(signal.SIGINT, self._record)
            _active = self

    def __exit__(self, *_: object) -> None:
        """Deliver a recorded interrupt."""
        global _active
        if _active is self:
            _active = None
            signal.signal(signal.SIGINT, self._handler)
            if self._frames:
                self._handler(signal.SIGINT, self._frames[0])

    def _record(self, number: int, frame: FrameType | None) -> None:
        self._frames.append(frame)


def deliver_interrupts() -> None:
    """Stop deferring in a process that was forked inside such a block."""
    if _active is not None:
        _active.__exit__()
