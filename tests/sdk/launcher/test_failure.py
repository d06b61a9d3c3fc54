"""The cause of a job's failure: the rank that the others' first failures name, not the one that exits first."""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from support.launchers import Launchers
from support.processes import Ranks, free_port, wait_until

import rankmesh as dist
import rankmesh.multiprocessing as mp
from rankmesh._launcher.failure import root_cause
from rankmesh._launcher.failure_file import FailureFile, FailureReport

processes = pytest.mark.processes
SECONDS = 60.0


# What the ranks' reports mean


@pytest.mark.parametrize(
    ("named", "failed", "cause"),
    [
        ({}, [0], 0),
        ({0: [2]}, [0, 2], 2),
        ({0: [3], 3: [2], 2: [1]}, [0, 3, 2, 1], 1),
        ({0: [1, 2]}, [0, 2, 1], 2),
        ({0: [1, 2]}, [0], 1),
        ({0: [1], 1: [0]}, [0, 1], 0),
        ({0: [1], 1: [2], 2: [1]}, [0, 1, 2], 1),
    ],
    ids=["none", "another", "a chain", "the first of two", "two that are elsewhere", "each other", "a ring behind"],
)
def test_the_root_cause(named: dict[int, list[int]], failed: list[int], cause: int):
    assert root_cause(0, named, failed) == cause


def test_reports_of_ranks():
    file = FailureFile()
    assert file.reports() == []
    reports = [FailureReport(0, 17, [2]), FailureReport(1, 18, [0, 2])]
    for report in reports:
        report.write(file.path)
    with open(file.path, "ab") as half:
        half.write(b"[3, 19")
    assert file.reports() == reports
    file.close()
    file.close()


def test_no_other_file_is_written_to(tmp_path: Path):
    other = tmp_path / "other"
    other.write_text("content")
    with other.open() as opened:
        FailureReport(0, 17, [2]).write(f"/proc/self/fd/{opened.fileno()}")
    FailureReport(0, 17, [2]).write(str(tmp_path / "none"))
    assert other.read_text() == "content"
    assert os.listdir(tmp_path) == ["other"]


# The launcher

ENDED = """
def ended(pid):
    return not os.path.exists(f"/proc/{pid}")
def wait_for(condition):
    wait_until(condition, "the others")
"""

CAUSE = """
with open(f"pid.{rank}.new", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"pid.{rank}.new", f"pid.{rank}")
dist.init_process_group()
wait_for(lambda: all(os.path.exists(f"pid.{other}") for other in range(size)))
victims = [int(open(f"pid.{other}").read()) for other in range(size) if other != CAUSE]
if rank != CAUSE:
    dist.all_reduce(np.ones(4))
try:
    raise ValueError("no such file: weights.npy")
finally:
    dist.destroy_process_group()
    wait_for(lambda: all(map(ended, victims)))  # each victim's launcher has reported its end
    sys.exit(7) if rank == 0 else None
"""


@processes
def test_victims_that_exit_before_the_cause_does(launchers: Launchers):
    code, _, lines = launchers.run(ENDED + CAUSE.replace("CAUSE", "2"), "--nproc-per-node=3", "--failure-grace=60")
    assert code == 1
    first = r"\[rankmesh\] rank [01] failed, and its error names rank 2; the others get 60 s to end"
    assert re.fullmatch(first, lines[1]), lines
    assert re.match(r"\[rankmesh\] rank 2 failed first: exit code 1 after ", lines[2]), lines
    assert "[rankmesh]   | ValueError: no such file: weights.npy" in lines
    place = r"at script\.py:\d+ in <module>"
    assert re.search(rf" s, {place} \(host ", lines[2]), lines
    assert re.fullmatch(rf"\[rankmesh\] ranks 0-1: ended because rank 2 failed \(exit code 1, .*, {place}\)", lines[-1])


@processes
def test_the_exit_code_is_that_of_the_cause(launchers: Launchers):
    code, _, lines = launchers.run(ENDED + CAUSE.replace("CAUSE", "0"), "--nproc-per-node=2", "--failure-grace=60")
    assert code == 7
    assert re.match(r"\[rankmesh\] rank 0 failed first: exit code 7 after ", lines[2]), lines


@processes
def test_a_cause_on_another_node(launchers: Launchers):
    place = ("--nnodes=2", "--nproc-per-node=2", f"--master-port={free_port()}", "--failure-grace=60")
    nodes = [launchers.start(ENDED + CAUSE.replace("CAUSE", "3"), f"--node-rank={node}", *place) for node in range(2)]
    (other, _, seen), (own, _, lines) = map(launchers.finish, nodes)
    assert (own, other) == (1, 1)
    assert any("rank 3 failed first: exit code 1 after " in line for line in lines), lines
    # Neither this launcher nor a gateway knows the exit code of a rank elsewhere that has called
    # destroy_process_group().
    victim = r"\[rankmesh\] rank [01] failed, and its error names rank 3 on another node"
    assert any(re.match(f"{victim}: exit code 1", line) for line in seen), seen
    assert not any("failed first" in line for line in seen), seen
    assert any("RankFailedError" in line and "rank 3 (" in line for line in seen), seen


REPORTS = """
from rankmesh._launcher.failure_file import FailureReport
named = {3: [2], 2: [1], 0: [1]}
order = [3, 2, 0, 1]
if rank in named:
    FailureReport(rank, os.getpid(), named[rank]).write(os.environ["RANKMESH_FAILURE_FILE"])
open(f"pid.{rank}", "w").write(str(os.getpid()))
before = order[: order.index(rank)]
wait_for(lambda: all(os.path.exists(f"pid.{other}") for other in range(4)))
wait_for(lambda: all(ended(open(f"pid.{other}").read()) for other in before))
sys.exit(10 + rank)
"""


@processes
def test_a_chain_ends_at_the_rank_that_blames_none(launchers: Launchers):
    code, _, lines = launchers.run(ENDED + REPORTS, "--nproc-per-node=4", "--failure-grace=60")
    assert code == 11
    assert "rank 3 failed, and its error names rank 2" in lines[1]
    assert "rank 1 failed first: exit code 11" in lines[2]
    assert [line.partition(" (")[0] for line in lines[-3:]] == [
        "[rankmesh] rank 0: ended because rank 1 failed",
        "[rankmesh] rank 2: ended because rank 1 failed",
        "[rankmesh] rank 3: ended because rank 2 failed",
    ]


@processes
def test_of_a_mismatch_no_rank_is_the_cause(launchers: Launchers):
    code, _, lines = launchers.run(
        "dist.init_process_group(); dist.all_reduce(np.ones(4 + rank))", "--nproc-per-node=2"
    )
    assert code == 1
    assert not any("ended because" in line for line in lines), lines
    assert any("CollectiveMismatchError" in line for line in lines)


@processes
def test_a_cause_that_does_not_end(launchers: Launchers):
    """The report is of the rank that did: the other one has nothing to tell."""
    code, _, lines = launchers.run(
        """
        from rankmesh._launcher.failure_file import FailureReport
        if rank == 0:
            FailureReport(0, os.getpid(), [1]).write(os.environ["RANKMESH_FAILURE_FILE"])
            sys.exit("rank 1 did not come")
        time.sleep(1000)
        """,
        "--nproc-per-node=2",
        "--failure-grace=0.1",
    )
    assert code == 1
    assert lines[2].startswith("[rankmesh] rank 0 failed, and its error names rank 1: exit code 1 after ")
    assert lines[3] == "[rankmesh]   rank 1 had not ended: signal SIGTERM (15) from the launcher"
    assert lines[5] == "[rankmesh]   | rank 1 did not come"


@processes
def test_one_traceback_for_all_ranks(launchers: Launchers):
    launcher = launchers.start(
        """
        dist.init_process_group()
        if rank == 1:
            raise ValueError("no more data")
        dist.all_reduce(np.ones(4))
        """,
        "--nproc-per-node=4",
        "--failure-grace=60",
    )
    _, stderr = launcher.communicate(timeout=SECONDS)
    assert stderr.count("Traceback (most recent call last)") == 2, "the failed rank's, there and in the report"
    assert "rankmesh/_collectives" not in stderr
    assert (
        len(re.findall(r"\[rank [023]\] rankmesh.RankFailedError: rank 1 .*\n\[rank .\]   at script.py:", stderr)) >= 1
    )
    assert re.search(r"\[rankmesh\] ranks 0, 2-3: ended because rank 1 failed \(exit code 1, ", stderr)


@processes
def test_a_rank_that_ends_with_exit_code_0_has_not_failed(launchers: Launchers):
    """It may have left too early, or the rank whose error names it is the one that is wrong."""
    code, _, lines = launchers.run(
        """
        from rankmesh._launcher.failure_file import FailureReport
        if rank != 1:
            FailureReport(rank, os.getpid(), [1]).write(os.environ["RANKMESH_FAILURE_FILE"])
            sys.exit("rank 1 has left")
        """,
        "--nproc-per-node=3",
    )
    assert code == 1
    assert not any("failed first" in line or "because" in line for line in lines), lines
    assert lines.count("[rankmesh]   rank 1 ended with exit code 0: do all ranks make the same calls?") == 1
    assert any(re.match(r"\[rankmesh\] rank [02] failed, and its error names rank 1: exit code 1", x) for x in lines)
    assert any(line.startswith("[rankmesh] rank 1: exit code 0, ") for line in lines)


# spawn


def fail_last(i: int, size: int, how: str) -> None:
    """The last process leaves the others, which end before it does."""
    import numpy as np

    Path(f"new.{i}").write_text(str(os.getpid()))
    os.rename(f"new.{i}", f"pid.{i}")
    dist.init_process_group(rank=i, world_size=size)
    wait_until(lambda: len(list(Path().glob("pid.*"))) == size, "all to begin")
    if i != size - 1:
        dist.all_reduce(np.ones(4))
    try:
        raise ValueError("no such file: weights.npy")
    finally:
        dist.destroy_process_group()
        others = [Path("/proc", Path(f"pid.{other}").read_text()) for other in range(size - 1)]
        wait_until(lambda: not any(each.exists() for each in others), "the others to end")
        if how == "exit":
            sys.exit(3)


def spawn_failing(size: int, how: str, port: int) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    context = mp.spawn(fail_last, args=(size, how), nprocs=size, join=False)
    assert context is not None
    try:
        context.join(grace_period=60)
    except mp.ProcessException as error:
        print(json.dumps({"error": type(error).__name__, "index": error.error_index, "text": str(error)}))


HEADER = """\
from __future__ import annotations
import json, os, sys
from pathlib import Path
import rankmesh as dist
import rankmesh.multiprocessing as mp
from support.me import wait_until
"""


@processes
@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("raise", "ProcessRaisedException", "ValueError: no such file: weights.npy"),
        ("exit", "ProcessExitedException", "terminated with exit code 3"),
    ],
)
def test_spawn_raises_the_cause(ranks: Ranks, how: str, error: str, text: str):
    sources: list[Any] = [fail_last, spawn_failing]
    path = ranks.folder / "program.py"
    call = f"if __name__ == '__main__':\n    spawn_failing(3, {how!r}, {free_port()})\n"
    path.write_text("\n\n".join([HEADER, *map(inspect.getsource, sources), call]))
    started = ranks.command(str(path), name="program")
    ranks.wait([started])
    assert (started.reported["error"], started.reported["index"]) == (error, 2), started
    assert text in started.reported["text"]
    wait_until(lambda: not ranks.left(), "the standard library's helpers to end")
