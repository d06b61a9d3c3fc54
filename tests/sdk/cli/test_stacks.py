"""``rankmesh stacks`` of a real job."""

from __future__ import annotations

import os
import signal

import pytest
from support.command import Job

pytestmark = pytest.mark.processes


def test_the_users_frames_are_shown_and_the_others_folded(job: Job):
    code, stdout, stderr = job.here("stacks", "--patience", "20")
    assert (code, stderr) == (0, "")
    assert [line.split()[:2] for line in stdout.splitlines() if line.startswith("rank")] == [
        ["rank", str(rank)] for rank in range(3)
    ]
    assert stdout.count("Thread 'MainThread'") == 3
    assert stdout.count('/script.py", line ') == 3
    assert "rankmesh-heartbeat" not in stdout
    assert stdout.count("threads without a line of yours (--all shows them)") == 3


def test_all_threads_and_frames(job: Job):
    code, stdout, _ = job.here("stacks", "1", "--all", "--patience", "20")
    assert code == 0
    assert stdout.startswith("rank 1 (")
    assert "Thread 'rankmesh-heartbeat'" in stdout
    assert "threads without" not in stdout


def test_the_document(job: Job):
    done = job.here("stacks", "2", "0", "--json", "--patience", "20")
    assert (done.code, done.stderr) == (0, "")
    assert [(each["rank"], each["error"], each["attached"]) for each in done.document] == [
        (0, "", False),
        (2, "", False),
    ]
    main = done.document[0]["stacks"][0]
    assert main["name"] == "MainThread"
    origins = [frame["origin"] for frame in main["frames"]]
    assert origins[0] == "user"
    assert set(origins) <= {"user", "rankmesh", "library"}
    own = [thread for thread in done.document[0]["stacks"] if thread["name"] == "rankmesh-heartbeat"]
    assert {frame["origin"] for thread in own for frame in thread["frames"]} == {"library", "rankmesh"}


def test_a_rank_that_is_not_there(job: Job):
    code, stdout, stderr = job.here("stacks", "1", "7", "--patience", "20")
    assert code == 1
    assert "rank 1 (" in stdout
    assert stderr == "rankmesh: there is no rank 7; 'rankmesh status' lists the ranks\n"


def test_a_rank_that_does_not_answer(job: Job):
    member = job.all_alive()[1]["member"]
    os.kill(member["pid"], signal.SIGSTOP)
    try:
        code, stdout, stderr = job.here("stacks", "1", "--patience", "0.3")
    finally:
        os.kill(member["pid"], signal.SIGCONT)
    job.all_alive()
    assert code == 3
    lines = stdout.splitlines()
    assert lines[0] == f"rank 1 ({member['host']}, pid {member['pid']}): no answer; its stacks as py-spy sees them"
    assert lines[1].startswith("  Thread 'MainThread'")
    assert "does not answer: no answer within 0.3 s; 'rankmesh diagnose' explains it" in stderr


def test_a_token_that_is_wrong(job: Job):
    code, stdout, stderr = job.here("stacks", RANKMESH_TOKEN="another")
    assert (code, stdout) == (4, "")
    assert stderr.count("\n") == 1
