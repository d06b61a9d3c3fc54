"""``rankmesh diagnose`` of stuck jobs; docs/stuck-job.md has its report on each kind.

The page's table is this test's: 'PYTHONPATH=tests python -m sdk.cli.test_diagnose' prints it.
"""

from __future__ import annotations

import contextlib
import re
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import hosting
from support.command import Done, Job, here, until_it_fits
from support.diagnose_page import CAN_FREEZE, FREEZE, normalized, page_rows, remove_control_group, row_of, run_script
from support.diagnose_page import SCRIPT as NAME
from support.observed import ALONE, TWO_GROUPS, Stuck, message_kinds
from support.processes import Ranks, wait_until

SCRIPT = """\
import ctypes, os, queue, signal, subprocess, sys, time
import numpy as np
import rankmesh as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
store = dist.get_default_store()
data, large = np.ones(1000, np.float32), np.ones(5_000_000, np.float32)
{before}
for step in range(3):
    if step == 2 and rank == 2:
{stuck}
    dist.all_reduce(data)
"""


REST = [0, 1, 3]
KINDS = [
    *(each._replace(kind="silent") if "PyDLL" in each.lines + each.before else each for each in ALONE),
    Stuck("calls of two groups in another order", "pass", "order", [0, 1], [2, 3], TWO_GROUPS),
    Stuck("a key that no rank sets", "store.get('batch')", "key"),
    *message_kinds("dist.send", "dist.recv")[:-1],
    Stuck("a message that is not sent", "dist.recv(data, 3)", "order", [2, 3], [0, 1]),
]
LINES = {
    "a loader that gets no data": "return batches.get()",
    "held by a debugger": "time.sleep(3600)",
    "waiting in the kernel, as for a network disk that is gone": "c.syscall(clone,",
    "calls of two groups in another order": "dist.all_reduce(data, group=one)",
    "two ranks that send to each other": "dist.send(large, 1 - rank)",
    "two ranks that receive from each other": "dist.recv(large, 1 - rank)",
    "messages with different tags": "dist.send(large, 1, tag=4)",
}
"""A part of the line that the finding must name; of other kinds what rank 2 does."""


class StuckJob:
    """A job of four ranks that gets stuck."""

    def __init__(self, ranks: Ranks, stuck: Stuck, **gateway: str) -> None:
        self.ranks = ranks
        self.script = ranks.folder / NAME
        self.script.write_text(stuck.script(SCRIPT))
        self.place = {
            "RANKMESH_GATEWAY": hosting.cluster(gateway, 0, "gateway").url,
            "RANKMESH_HOSTING": "embedded",
            "WORLD_SIZE": "4",
        }
        self.started = ranks.start(run_script, 4, env=lambda rank: {**self.place, "RANK": str(rank)})

    def run(self, *arguments: str) -> Done:
        """Run a command about the job."""
        return here(*arguments, "--job", self.ranks.job, RANKMESH_GATEWAY=self.place["RANKMESH_GATEWAY"])

    def finding(self, kind: str, waiting: Sequence[int]) -> dict[str, Any]:
        """Return the only finding, once it is of a kind and these ranks wait."""

        def look() -> dict[str, Any] | None:
            assert all(rank.code is None for rank in self.started), self.ranks.transcript()
            done = self.run("diagnose", "--json")
            found = done.document["findings"] if done.stdout else []
            assert done.code in (0, 1), done
            settled = len(found) == 1 and found[0]["kind"] == kind and found[0]["waiting"] == [*waiting]
            return found[0] if settled and found[0]["seconds"] >= 1 else None

        return wait_until(look, f"{kind}: {self.run('diagnose')}", 60.0)

    def end(self) -> None:
        for rank in self.started:
            rank.kill()  # a stopped one, or one that holds the lock, hears nothing else
        self.ranks.wait(self.started)
        for rank in self.started:
            remove_control_group(rank.pid)


@contextlib.contextmanager
def stuck_job(ranks: Ranks, stuck: Stuck, **gateway: str) -> Iterator[StuckJob]:
    job = StuckJob(ranks, stuck, **gateway)
    try:
        yield job
    finally:
        job.end()


@pytest.mark.processes
@pytest.mark.parametrize("stuck", KINDS, ids=lambda stuck: stuck.title)
def test_the_report_is_the_pages(ranks: Ranks, stuck: Stuck):
    if "freeze" in stuck.lines and not CAN_FREEZE:
        pytest.skip("making a control group needs root, and version 2 of control groups")
    cell = normalized(page_rows()[stuck.title])
    with stuck_job(ranks, stuck) as job:
        found = job.finding(stuck.kind, stuck.waiting)
        done = until_it_fits(lambda: job.run("diagnose"), lambda done: normalized(row_of(done.stdout)) == cell)
        source = job.script.read_text().splitlines()
    assert found["ranks"] == [*stuck.ranks]
    if stuck.before is not FREEZE:
        place = found["places"][str(stuck.ranks[0])]
        assert LINES.get(stuck.title, stuck.lines) in source[int(place.rpartition(":")[2]) - 1]
    for rank in stuck.waiting:
        assert found["places"][str(rank)] == f"{job.script}:{len(source)}"
    assert (done.code, done.stderr) == (1, "")


@pytest.mark.processes
def test_a_rank_of_another_host_than_the_gateways_is_seen_by_its_neighbours(ranks: Ranks, tmp_path: Path):
    (stopped,) = (stuck for stuck in KINDS if stuck.title == "stopped")
    with stuck_job(ranks, stopped, RANKMESH_SHM_DIR=str(tmp_path)) as job:  # where it shares no memory with them
        found = job.finding("stopped", REST)
        done = until_it_fits(lambda: job.run("stacks", "2"), lambda done: stopped.lines in done.stdout)
    assert list(found["places"]) == ["0", "1", "2", "3"]
    assert done.code == 3
    assert ": no answer; its stacks as py-spy sees them" in done.stdout


def test_the_page_has_no_other_rows():
    cut = "cut off from the network"  # tests/hosts/test_cut_host.py
    assert list(page_rows()) == [*(stuck.title for stuck in KINDS), cut]


@pytest.mark.processes
def test_a_job_that_is_not_stuck(job: Job):
    done = until_it_fits(lambda: job.here("diagnose", "--patience", "20"), lambda done: done.code == 0)
    assert done.stderr == ""
    assert re.fullmatch(r"nothing is stuck in \S+: 3 ranks answer, and none waits for another\n", done.stdout)
    done = until_it_fits(lambda: job.here("diagnose", "--patience", "20", "--json"), lambda done: done.code == 0)
    document = done.document
    assert (document["ok"], document["findings"], len(document["ranks"])) == (True, [], 3)


def _table() -> None:
    """Print the page's table."""
    for stuck in KINDS:
        ranks = Ranks(Path(tempfile.mkdtemp()))
        with stuck_job(ranks, stuck) as job:
            job.finding(stuck.kind, stuck.waiting)
            text = row_of(job.run("diagnose").stdout).replace(socket.gethostname(), "vm")
            print(f"| {stuck.title} | {text} |", flush=True)


if __name__ == "__main__":
    _table()
