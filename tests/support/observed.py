"""Kinds of stuck jobs, and those of other libraries under ``rankmesh observe``: columns of docs/stuck-job.md's table.

They are written by their tests: 'PYTHONPATH=tests python -m mpi.test_observe' prints mpi4py's.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.command import COMMAND, Done, here
from support.diagnose_page import (
    CAN_FREEZE,
    DEBUGGED,
    DEBUGGER,
    FREEZE,
    LOADER,
    SCRIPT,
    UNINTERRUPTIBLE,
    normalized,
    page_rows,
    remove_control_group,
)
from support.processes import Rank, Ranks, wait_until

OBSERVE = [*COMMAND, "observe"]


class Stuck(NamedTuple):
    """A way in which a job is stuck.

    Attributes:
        title: of the row.
        lines: what rank 2 does in the third step.
        kind, ranks, waiting: of the finding.
        before: lines before the loop.
    """

    title: str
    lines: str
    kind: str = "elsewhere"
    ranks: Sequence[int] = (2,)
    waiting: Sequence[int] = (0, 1, 3)
    before: str = ""

    def script(self, template: str) -> str:
        return template.format(before=textwrap.dedent(self.before), stuck=textwrap.indent(self.lines, " " * 8))


ALONE = [
    Stuck("a loader that gets no data", "load_batch()", before=LOADER),
    Stuck("`time.sleep`", "time.sleep(3600)"),
    Stuck("C code that holds the interpreter's lock", "ctypes.PyDLL(None).sleep(3600)"),
    Stuck("stopped", "os.kill(os.getpid(), signal.SIGSTOP)", "stopped"),
    Stuck("held by a debugger", DEBUGGED, "stopped", before=DEBUGGER),
    Stuck("frozen by its control group, as by `docker pause`", "freeze()", "stopped", before=FREEZE),
    Stuck("waiting in the kernel, as for a network disk that is gone", "read_disk()", before=UNINTERRUPTIBLE),
]
"""What holds up one rank, whatever the library."""


TWO_GROUPS = """
one, other = dist.new_group([0, 1]), dist.new_group([0, 1])
if rank == 0:
    dist.all_reduce(data, group=one)
    dist.all_reduce(data, group=other)
if rank == 1:
    dist.all_reduce(data, group=other)
    dist.all_reduce(data, group=one)
"""
"""Calls of two groups in another order, of torch.distributed and of rankmesh."""


def message_kinds(send: str, recv: str) -> list[Stuck]:
    """Return the ways in which messages hold up a job, by the names of a library's functions."""
    pair = "if rank < 2:\n    {0}(large, 1 - rank)\n    {1}(large, 1 - rank)".format
    tags = f"if rank == 0:\n    {send}(large, 1, tag=4)\nif rank == 1:\n    {recv}(large, 0, tag=5)"
    return [
        Stuck("two ranks that send to each other", "pass", "messages", [0, 1], [2, 3], pair(send, recv)),
        Stuck("two ranks that receive from each other", "pass", "messages", [0, 1], [2, 3], pair(recv, send)),
        Stuck("messages with different tags", "pass", "tags", [0, 1], [2, 3], tags),
        Stuck("a message that is not sent", f"{recv}(data, 3)", "order", [0, 1, 2, 3], []),
    ]


Start = Callable[[Ranks, Path], Rank]
"""Starts the launcher of a script's four ranks under ``rankmesh observe``."""


class ObservedJob:
    """A job under ``rankmesh observe``, found by its environment."""

    def __init__(self, ranks: Ranks, script: str, start: Start) -> None:
        self.ranks, self.script = ranks, ranks.folder / SCRIPT
        self.script.write_text(script)
        self.job = f"observe-{ranks.job}"
        self.launcher = start(ranks, self.script)

    def gateway(self) -> str:
        """Return the gateway's URL, which rank 0's observer has printed."""

        def find() -> str | None:
            printed = self.launcher.stderr + self.launcher.stdout
            assert self.launcher.code is None, repr(self.launcher)
            return printed.partition("diagnose --gateway ")[2].partition("'")[0] or None

        return wait_until(find, "the gateway", 60.0)

    def run(self, *arguments: str) -> Done:
        return here(*arguments, "--gateway", self.gateway())

    def findings(self) -> list[dict[str, Any]]:
        done = self.run("diagnose", "--json")
        assert done.code in (0, 1), done
        return json.loads(done.stdout)["findings"]

    def finding(self, stuck: Stuck) -> tuple[dict[str, Any], float]:
        """Return the only finding once it is the one, and how long the answer took."""

        def look() -> tuple[dict[str, Any], float] | None:
            began = time.monotonic()
            found = self.findings()
            took = time.monotonic() - began
            wanted = stuck.kind, list(stuck.ranks), list(stuck.waiting)
            fits = len(found) == 1 and (found[0]["kind"], found[0]["ranks"], found[0]["waiting"]) == wanted
            return (found[0], took) if fits and found[0]["seconds"] >= 1 else None

        return wait_until(look, f"{stuck.kind}: {self.run('diagnose')}", 60.0)

    def end(self) -> None:
        pids = [each["pid"] for each in self.run("diagnose", "--json").document["ranks"]]
        self.launcher.kill(signal.SIGTERM)
        self.ranks.wait([self.launcher], 60)
        for pid in pids:
            remove_control_group(pid)


@contextlib.contextmanager
def observed_job(ranks: Ranks, script: str, start: Start) -> Iterator[ObservedJob]:
    job = ObservedJob(ranks, script, start)
    try:
        yield job
    finally:
        job.end()


def check_row(ranks: Ranks, stuck: Stuck, template: str, start: Start, column: int) -> None:
    """Run a stuck job, and compare the finding with the table."""
    if stuck.before is FREEZE and not CAN_FREEZE:
        pytest.skip("making a control group needs root, and version 2 of control groups")
    with observed_job(ranks, stuck.script(template), start) as job:
        found, _ = job.finding(stuck)
    assert normalized(found["text"]) == normalized(page_rows(column)[stuck.title])


def print_column(kinds: Sequence[Stuck], template: str, start: Start) -> None:
    """Print a column of the table."""
    for stuck in kinds:
        with observed_job(Ranks(Path(tempfile.mkdtemp())), stuck.script(template), start) as job:
            found, took = job.finding(stuck)
            print(f"{stuck.title}\t{found['text'].replace(socket.gethostname(), 'vm')}\t{took:.2f}", flush=True)
