"""PyTorch's own distributed tests, as they come with torch, run over a backend in a process of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


class Plan(NamedTuple):
    """How tests are run.

    Attributes:
        backend: what their groups are made with.
        size: how many ranks there are.
        like: the backend, one of torch's own, for which torch's file is told to choose its tests.
        names: the tests' methods; all that there are if it is empty.
        deadline: seconds for one test.
        gpus_in_host_memory: whether tests that ask for GPUs get such; see host_memory.py.
    """

    backend: str
    size: int
    like: str = "gloo"
    names: Sequence[str] = ()
    deadline: float = 90.0
    gpus_in_host_memory: bool = False

    def __str__(self) -> str:
        return f"{self.size}-ranks-as-for-{self.like}{'-with-gpus' if self.gpus_in_host_memory else ''}"


class Outcome(NamedTuple):
    """What became of a test.

    Attributes:
        test: the name of its method.
        outcome: PASSED, FAILED or SKIPPED.
        reason: why it was skipped, or the errors of all ranks that had one.
        seconds: how long it took.
        cpu: processor time that its ranks took, in seconds.
    """

    test: str
    outcome: str
    reason: str
    seconds: float
    cpu: float


def run(plan: Plan, limit: float) -> Iterator[Outcome]:
    """Run tests one after another and give what becomes of each.

    There are fewer outcomes than tests when the process that runs them ends early, or after ``limit`` seconds; the last
    line of what it printed is then the reason of an additional outcome of no name.
    """
    command = [sys.executable, "-m", "tools.torch_suite.harness", json.dumps(plan)]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=printed,
            text=True,
            start_new_session=True,
        )
        timer = threading.Timer(limit, _end, [process])
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                yield Outcome(*json.loads(line))
            if process.wait() != 0:
                printed.seek(0)
                last = (printed.read().splitlines() or ["it reported nothing"])[-1]
                yield Outcome("", FAILED, f"the tests ended early, exit code {process.returncode}: {last}", limit, 0.0)
        finally:
            timer.cancel()
            _end(process)
            process.wait()


def _end(process: subprocess.Popen[str]) -> None:
    """End the harness and its ranks."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
