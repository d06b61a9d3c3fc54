"""Other programs on the machine: processes that only compute, while a case of a busy host has its turn."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import AbstractContextManager

from benchmarks.workers import MeasurementError

_PROGRAM = "import signal; signal.alarm(3600)\nwhile True: pass"
"""Ends by itself after an hour, should the benchmark be killed."""


class BusyProcesses(AbstractContextManager["BusyProcesses"]):
    """Processes that compute on order, and are stopped otherwise; the end of the ``with`` block ends them.

    Attributes:
        processes: all that were needed so far.
    """

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def run(self, count: int) -> None:
        """Let ``count`` processes compute.

        Raises:
            MeasurementError: one of them has ended.
        """
        while len(self.processes) < count:
            command = [sys.executable, "-S", "-c", _PROGRAM]
            # Of a session of its own, as a stranger is: the kernel may share the cores among sessions.
            self.processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True))
        for number, process in enumerate(self.processes):
            if process.poll() is not None:
                raise MeasurementError(f"A process that was to keep the machine busy ended: {process.returncode}")
            process.send_signal(signal.SIGCONT if number < count else signal.SIGSTOP)
