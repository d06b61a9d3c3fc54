"""``rankmesh run --replace``: the other ranks go on, and another process takes the place of a failed one."""

from __future__ import annotations

import pytest
from support.launchers import Launchers

pytestmark = pytest.mark.processes

MEMBER = """
joining = os.environ.get("RANKMESH_JOIN") == "1"
def sum_is(size):
    array = np.ones(4)
    dist.all_reduce(array)
    assert array.tolist() == [size] * 4, array
"""


def test_another_process_takes_the_place_of_a_failed_one(launchers: Launchers) -> None:
    code, stdout, lines = launchers.run(
        MEMBER
        + """
dist.init_process_group()
if not joining:
    sum_is(3)
    if rank == 1:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            sum_is(3)
    except dist.RankFailedError as error:
        dist.shrink_group(list(error.ranks))
    sum_is(2)
    dist.grow_group(3)
sum_is(3)
print("rank", dist.get_rank(), "joined" if joining else "stayed", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
dist.destroy_process_group()
""",
        *("--nproc-per-node=3", "--max-restarts=2", "--replace"),
    )
    assert code == 0
    assert sorted(stdout.splitlines()) == [
        "[rank 0] rank 0 stayed 0",
        "[rank 1] last words",
        "[rank 1] rank 2 joined 0",
        "[rank 2] rank 1 stayed 0",
    ]
    (line,) = [line for line in lines if "replacement" in line]
    assert line.startswith("[rankmesh] rank 1 failed: signal SIGKILL (9); replacement 1 of 2: pid ")
    assert line.endswith(" joins the others")


def test_a_rank_that_fails_before_the_world_is_complete(launchers: Launchers) -> None:
    code, stdout, lines = launchers.run(
        MEMBER
        + """
if rank == 1 and not joining:
    sys.exit(7)
dist.init_process_group()
sum_is(3)
print("rank", dist.get_rank(), flush=True)
dist.destroy_process_group()
""",
        *("--nproc-per-node=3", "--max-restarts=2", "--replace"),
    )
    assert code == 0
    assert sorted(stdout.splitlines()) == [f"[rank {rank}] rank {rank}" for rank in range(3)]
    assert [line for line in lines if "rank 1 failed: exit code 7; replacement 1 of 2" in line]


def test_a_program_that_does_not_go_on_ends_as_without_the_option(launchers: Launchers) -> None:
    code, _, lines = launchers.run(
        MEMBER
        + """
dist.init_process_group()
sum_is(3)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    sum_is(3)
""",
        *("--nproc-per-node=3", "--max-restarts=9", "--replace", "--failure-grace=0.5", "--stop-grace=1"),
    )
    assert code == 1
    # A replacement may fail, too, before the ranks that it would have joined have ended.
    assert 1 <= len([line for line in lines if "replacement" in line]) < 9, lines
    assert [line for line in lines if "RankFailedError: rank 1" in line], lines


def test_when_no_replacement_is_left_a_failure_ends_the_job(launchers: Launchers) -> None:
    code, _, lines = launchers.run(
        MEMBER
        + """
dist.init_process_group()
if joining or rank == 1:
    sys.exit(5)
try:
    while True:
        sum_is(2)
except dist.RankFailedError as error:
    dist.shrink_group([1])
while True:
    dist.grow_group(2)
    dist.on_failure(lambda error: None)
    try:
        while True:
            sum_is(2)
    except dist.RankFailedError as error:
        dist.shrink_group([1])
""",
        *("--nproc-per-node=2", "--max-restarts=1", "--replace", "--failure-grace=0.2", "--stop-grace=1"),
    )
    assert code == 5
    assert len([line for line in lines if "replacement 1 of 1" in line]) == 1, lines
    assert [line for line in lines if "rank 1 failed" in line and "exit code 5" in line], lines


def test_a_process_whose_job_is_over_before_it_joins_is_told_so(launchers: Launchers) -> None:
    code, stdout, _ = launchers.run(
        MEMBER
        + """
if joining:
    write("joining")
try:
    dist.init_process_group()
except dist.errors.JobEndedError as error:
    print("over:", error, flush=True)
    sys.exit(0)
if rank == 1:
    sys.exit(5)
try:
    while True:
        sum_is(2)
except dist.RankFailedError as error:
    dist.shrink_group([1])
wait_until(lambda: os.path.exists("joining.0.1"), "the other process")
dist.destroy_process_group()
""",
        *("--nproc-per-node=2", "--max-restarts=1", "--replace"),
    )
    assert code == 0
    assert "over: the gateway at http://" in stdout
    assert "have left: there is no world" in stdout
