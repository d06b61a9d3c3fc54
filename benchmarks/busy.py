"""Other programs on the machine: processes that only compute, while a case of a busy host has its turn."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from typing import Self

from benchmarks.workers import MeasurementError

_PROGRAM = "import signal; signal.alarm(3600)\nwhile True: pass"
"""Ends by itself after an hour, should the benchmark be killed."""


class BusyProcesses(AbstractContextManager["BusyProcesses"]):
    """Processes that compute on order, and are stopped otherwise.

    Args:
        most: how many there are.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        for _ in range(self._most):
            command = [sys.executable, "-S", "-c", _PROGRAM]
            # Of a session of its own, as a stranger is: the kernel may share the cores among sessions.
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
            self._processes.append(process)
            process.send_signal(signal.SIGSTOP)
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def run(self, count: int) -> None:
        """Let the first ``count`` processes compute, and no others.

        Raises:
            MeasurementError: one of them has ended.
        """
        for number, process in enumerate(self._processes):
            if process.poll() is not None:
                raise MeasurementError(f"A process that was to keep the machine busy ended: {process.returncode}")
            os.kill(process.pid, signal.SIGCONT if number < count else signal.SIGSTOP)
