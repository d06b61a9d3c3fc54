"""A daemon thread that runs checks at intervals, while there are any."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_log = logging.getLogger("rankmesh")
Check = Callable[[], float | None]
"""Checks for calls that cannot complete; returns the seconds until the next check, None to wait for ``wake``."""


class Watchdog:
    """Runs checks in one thread, which starts with the first check and ends with the last.

    Args:
        close_seconds: longest time that ``remove`` waits for the thread, which may be inside a check.
    """

    def __init__(self, name: str, close_seconds: float) -> None:
        self._name = name
        self._close_seconds = close_seconds
        self._lock = threading.Lock()
        self._checks: list[Check] = []
        self.thread: threading.Thread | None = None
        self._wakeup = threading.Event()

    def add(self, check: Check) -> None:
        """Run a check from now on. Does nothing the second time."""
        with self._lock:
            if check in self._checks:
                return
            self._checks.append(check)
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self.thread.start()
        self._wakeup.set()

    def remove(self, check: Check) -> None:
        """Stop running a check. With the last one the thread ends. Does nothing the second time."""
        with self._lock:
            if check not in self._checks:
                return
            self._checks.remove(check)
            thread = self.thread if not self._checks else None
        if thread is not None and thread is not threading.current_thread():
            self._wakeup.set()
            thread.join(self._close_seconds)

    def wake(self) -> None:
        """Run the checks at once. Thread-safe."""
        self._wakeup.set()

    def _run(self) -> None:
        pause: float | None = 0.0
        while True:
            self._wakeup.wait(pause)
            self._wakeup.clear()
            with self._lock:
                checks = self._checks.copy()
                if not checks:
                    self.thread = None
                    return
            pauses = []
            for check in checks:
                try:
                    pauses.append(check())
                except Exception:
                    _log.warning("%s: a check failed", self._name, exc_info=True)
                    pauses.append(1.0)
            pause = min((seconds for seconds in pauses if seconds is not None), default=None)
