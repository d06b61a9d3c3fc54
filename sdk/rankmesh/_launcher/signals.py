"""Signals as bytes in a pipe, read by an event loop."""

from __future__ import annotations

import contextlib
import os
import signal

TERMINATION = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""The signals that terminate the launcher."""


class SignalPipe:
    """Context manager that collects the TERMINATION signals instead of delivering them; for the main thread only.

    A signal that was ignored before stays ignored, as nohup requires for SIGHUP.
    """

    def __enter__(self) -> SignalPipe:
        self.fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup_before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._before = {
            number: signal.signal(number, _collect)
            for number in TERMINATION
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self.fd)
        os.close(self._write_fd)

    def wake(self) -> None:
        """Have the event loop look around, though no signal has come. From any thread."""
        with contextlib.suppress(BlockingIOError):  # it is full, and will be read
            os.write(self._write_fd, bytes(1))

    def read(self) -> list[signal.Signals]:
        """Return the signals received since the last call, in order."""
        try:
            received = os.read(self.fd, 64)
        except BlockingIOError:
            return []
        return [signal.Signals(number) for number in received if number in self._before]  # 0 is no signal


def _collect(*_: object) -> None:
    """Do nothing: any handler makes Python write the signal's number to the wakeup descriptor."""
