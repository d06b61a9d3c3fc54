"""Signals as bytes in a pipe, for an event loop to read."""

from __future__ import annotations

import os
import signal
from types import TracebackType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""The signals that ask the launcher to end."""


class SignalInbox:
    """While entered, collects the ENDING signals instead of letting them act. Only the main thread can enter.

    A signal that was ignored before, as nohup does with SIGHUP, stays ignored.
    """

    def __enter__(self) -> SignalInbox:
        self.fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup_before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._before = {
            number: signal.signal(number, _collect)
            for number in ENDING
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self.fd)
        os.close(self._write_fd)

    def read(self) -> list[signal.Signals]:
        """Return the signals that came since the last call, in order."""
        try:
            received = os.read(self.fd, 64)
        except BlockingIOError:
            return []
        return [signal.Signals(number) for number in received if number in self._before]


def _collect(*_: object) -> None:
    """Do nothing: having any handler makes Python write the signal's number to the wakeup descriptor."""
