"""``rankmesh run --max-restarts``: all ranks of a job that failed start again."""

from __future__ import annotations

import json
import os
import signal

import pytest
from support.launchers import Launchers, alive

pytestmark = pytest.mark.processes


def test_a_job_that_fails_twice_and_then_succeeds(launchers: Launchers) -> None:
    code, stdout, lines = launchers.run(
        """
        told = {name: os.environ[name] for name in os.environ if name.startswith("TORCHELASTIC_")}
        print("told", json.dumps(told | {"rank": rank, "size": size}), flush=True)
        dist.init_process_group()
        all_reduce()
        if rank == 1 and attempt < 2:
            sys.exit(f"rank 1 fails in attempt {attempt}")
        all_reduce()
        dist.destroy_process_group()
        """,
        *("--nproc-per-node=2", "--max-restarts=3"),
    )
    assert code == 0
    told = [json.loads(line.partition("told ")[2]) for line in stdout.splitlines() if "told " in line]
    assert [(each["TORCHELASTIC_RESTART_COUNT"], each["TORCHELASTIC_MAX_RESTARTS"]) for each in told] == [
        (str(attempt), "3") for attempt in range(3) for _ in range(2)
    ]
    assert len({each["TORCHELASTIC_RUN_ID"] for each in told}) == 1
    sums = [line.partition("] ")[2] for line in stdout.splitlines() if "sum" in line]
    assert sorted(sums) == ["sum 0"] * 2 + ["sum 1"] * 2 + ["sum 2"] * 4
    restarts = [line for line in lines if "restart" in line]
    assert restarts == [f"[rankmesh] restart {number} of 3: all 2 ranks start again" for number in (1, 2)]
    for attempt in range(2):
        begin = lines.index(f"[rankmesh] restart {attempt + 1} of 3: all 2 ranks start again")
        report = [line for line in lines[:begin] if "rank 1 failed first: exit code 1" in line]
        assert len(report) == attempt + 1
        assert f"[rankmesh]   | rank 1 fails in attempt {attempt}" in lines[:begin]


def test_the_restarts_are_used_up(launchers: Launchers) -> None:
    code, _, lines = launchers.run(
        """
        dist.init_process_group()
        all_reduce()
        sys.exit(3 + attempt) if rank == 1 else all_reduce()
        """,
        *("--nproc-per-node=2", "--max-restarts=1"),
    )
    assert code == 4, "the exit code of the last attempt"
    assert sum("restart 1 of 1: all 2 ranks start again" in line for line in lines) == 1
    assert [line.partition(" after")[0] for line in lines if "failed first" in line] == [
        "[rankmesh] rank 1 failed first: exit code 3",
        "[rankmesh] rank 1 failed first: exit code 4",
    ]


@pytest.mark.parametrize("collected", [True, False])
def test_an_exception_ends_a_rank_without_a_collection(launchers: Launchers, collected: bool) -> None:
    """For its end a restart waits. A rank that succeeds ends as Python does."""
    code, stdout, _ = launchers.run(
        f"""
        class Circle:
            def __init__(self):
                self.itself = self
            def __del__(self):
                os.write(1, b"collected")
        dist.init_process_group()
        circle, log = Circle(), open("log", "w")
        log.write("the last line")
        if not {collected}:
            raise ValueError
        """,
        "--nproc-per-node=1",
    )
    assert (code, "collected" in stdout) == (0 if collected else 1, collected)
    assert (launchers.folder / "log").read_text() == "the last line"


def test_a_failure_before_the_world_is_complete(launchers: Launchers) -> None:
    """The joins of the failed attempt, one of which comes late, are not part of the next one's world."""
    code, stdout, lines = launchers.run(
        """
        if rank == 1 and attempt == 0:
            import urllib.request
            url = os.environ["RANKMESH_GATEWAY"] + "/v1/ranks"
            request = urllib.request.Request(url, headers={"Authorization": "Bearer the secret of all"})
            wait_until(lambda: len(json.load(urllib.request.urlopen(request))) == 2, "the others to join")
            sys.exit("no data")
        dist.init_process_group()
        all_reduce()
        """,
        *("--nproc-per-node=3", "--max-restarts=1", "--failure-grace=0"),
    )
    assert code == 0, lines
    assert stdout.count("sum 1") == 3
    assert stdout.count("sum 0") == 0


def test_a_signal_to_the_launcher_does_not_restart(launchers: Launchers) -> None:
    launcher = launchers.start(
        """
        dist.init_process_group()
        all_reduce()
        if attempt == 0:
            sys.exit(3)
        write("ready")
        time.sleep(1000)
        """,
        *("--nproc-per-node=2", "--max-restarts=5"),
    )
    pids = launchers.pids("ready", 1, 2)
    launcher.terminate()
    code, _, lines = launchers.finish(launcher)
    assert code == 128 + signal.SIGTERM
    assert sum(": all 2 ranks start again" in line for line in lines) == 1
    assert not any(alive(pid) for pid in pids)


def test_a_signal_in_the_grace_after_a_failure_does_not_restart(launchers: Launchers) -> None:
    launcher = launchers.start(
        """
        write("ready")
        all_wrote("ready")
        sys.exit(3) if rank == 1 else time.sleep(1000)
        """,
        *("--nproc-per-node=2", "--max-restarts=5", "--failure-grace=1000"),
    )
    assert launcher.stderr is not None
    while "the others get 1000 s" not in launcher.stderr.readline():
        pass
    launcher.terminate()
    code, _, lines = launchers.finish(launcher)
    assert code == 3
    assert not any("start again" in line for line in lines)


# Two nodes

RESTARTED = "[rankmesh] restart {} of {}: all 2 ranks start again"


def test_a_node_whose_ranks_do_not_notice_the_failure(launchers: Launchers) -> None:
    nodes = launchers.start_nodes(
        """
        dist.init_process_group()
        all_reduce()
        if attempt == 0:
            write("ready")
            all_wrote("ready")
            sys.exit("no data") if rank == 1 else time.sleep(1000)
        all_reduce()
        """,
        *("--max-restarts=1", "--failure-grace=0.5"),
    )
    found = [launchers.finish(node) for node in nodes]
    assert [code for code, _, _ in found] == [0, 0]
    assert all(lines.count(RESTARTED.format(1, 1)) == 1 for _, _, lines in found)
    _, _, lines = found[0]
    assert "[rankmesh] a rank failed on another node; those of this node get 0.5 s to end" in lines
    assert not any("failed first" in line for line in lines), lines
    assert not any(alive(pid) for pid in launchers.pids("ready", 0, 2))


def test_a_node_that_is_lost_and_stays_away(launchers: Launchers) -> None:
    """It uses up one restart, however many there are: no ranks start without it."""
    first, lost = launchers.start_nodes(
        """
        dist.init_process_group()
        all_reduce()
        write("ready")
        time.sleep(1000) if rank else dist.barrier()
        """,
        *("--max-restarts=5", "--failure-grace=0.2", "--last-call=0"),
        RANKMESH_TIMEOUT="8",
    )
    launchers.pids("ready", 0, 2)
    lost.kill()
    lost.communicate()
    launchers.started.remove(lost)
    stdout, stderr = first.communicate(timeout=180)
    assert first.returncode == 1
    assert stdout.count("sum") == 1
    missing = f"1 of 2 node(s) are there: node 0 ({os.uname().nodename}); missing: node 1"
    assert stderr.count(f"{missing} (") == 1, stderr
    assert "rankmesh run: waited 8 s for the nodes of job" in stderr.splitlines()[-1]
    assert stderr.splitlines()[-1].endswith(missing)
