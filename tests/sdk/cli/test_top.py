"""``rankmesh top``, and ``rankmesh status`` on a terminal, which is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support import overview as made_up
from support.command import Double, Job, here
from support.terminal import Terminal

pytestmark = pytest.mark.processes

SNAPSHOTS = "/v1/ranks/snapshots?patience=1.0"
LIVE = ("--interval", "0.1")


@pytest.fixture
def gateway(double: Double, overview: Callable[..., dict[str, Any]]) -> Double:
    """A gateway with two ranks in calls: rank 1, observed, has more memory, and rank 0, slow, waits for longer."""
    double.answers["/v1/overview"] = found = overview()
    usage = {"cpu": 0.3, "core_wait": 0.0, "faults": 0.0, "memory": 1_000_000, "state": "S"}
    found["ranks"][0] |= {"slow": 0.25, "usage": usage}
    found["ranks"][1]["usage"] = usage | {"cpu": 0.03, "memory": 2_000_000, "state": "D"}
    found["ranks"][1]["member"]["observed"] = True
    call = made_up.snapshot(0)["snapshot"]["calls"][0]
    double.answers[SNAPSHOTS] = [
        made_up.snapshot(0, store_waits=[], calls=[call | {"age": 7.0}]) | {"job": "train-1"},
        made_up.snapshot(1, store_waits=[], calls=[call | {"age": 3.0}]) | {"job": "train-1"},
    ]
    return double


@pytest.mark.parametrize("command", ["top", "status"])
def test_keys_sort_and_show_a_stack(gateway: Double, command: str):
    with Terminal(command, "--gateway", gateway.url, *LIVE) as terminal:
        text = terminal.until(
            r"> +0  host-0 .* 30% .* 1 MB +25% .* 7\.0 s +all_reduce.*#3\n +1  host-1 .* 3% .* 2 MB .* 3\.0 s +D; all"
        )
        assert "all is well" in text
        terminal.press("m")
        terminal.until(r"> +1  host-1 .*\n +0  host-0 ")
        terminal.press("t")
        terminal.until(r"> +0  host-0 .*\n +1  host-1 ")
        terminal.press("\x1b[B")
        terminal.until(r"\n +0  host-0 .*\n +> +1  host-1 ")
        terminal.press("\n")
        text = terminal.until("Enter: back")
        assert "rank 1 (host-0, pid 4001)" in text
        assert 'File "/home/me/train.py", line 8, in step' in text
        terminal.press("\n")
        terminal.until(r"> +1  host-1 ")
        terminal.press("q")
        assert terminal.end() == 0


def test_it_goes_on_while_the_gateway_does_not_answer(gateway: Double):
    with Terminal("top", "--gateway", gateway.url, *LIVE) as terminal:
        terminal.until(r"operations/s.*\n +all is well")
        gateway.gone = True
        terminal.until("NO ANSWER since")
        gateway.gone = False
        terminal.until(r"MB/s\n +all is well")
        terminal.press("\x03")
        assert terminal.end() == 0
    assert b"Traceback" not in terminal.seen


def test_the_ranks_have_the_room_that_others_leave(gateway: Double, overview: Callable[..., dict[str, Any]]):
    ranks = [made_up.rank(rank, job="train-1", host=f"host-{rank}") for rank in range(200)]
    gateway.answers["/v1/overview"] = overview(ranks=ranks)
    with Terminal("top", "--gateway", gateway.url, *LIVE, rows=30, columns=60) as terminal:
        text = terminal.until("all_reduce")  # of the groups, below the ranks
        assert text.count("alive") < 20
        terminal.press("j" * 190)
        text = terminal.until(r"> +190  host-190")
        terminal.press("q")
        assert terminal.end() == 0


def test_a_role_that_shows_no_stacks(job: Job):
    credential = job.here("token", "--role", "read").stdout.strip()
    with Terminal("top", "--gateway", job.url, *LIVE, RANKMESH_TOKEN=credential) as terminal:
        terminal.until(r"> +0 .* alive.*\n(.*\n)+.* says: .*role")
        terminal.press("\n")
        assert " says: " in terminal.until("Enter: back")
        terminal.press("q")
        assert terminal.end() in (0, 1)


def test_a_real_job(job: Job):
    with Terminal("top", "--gateway", job.url, RANKMESH_TOKEN=job.token) as terminal:
        terminal.until(r"> +0 .* alive +\d+% +\d+% +[\d.]+ MB +[\d.]+ .*\n +1 .*\n +2 .* MB ")
        terminal.press("\n")
        terminal.until(r'script\.py", line \d+')
        terminal.press("q")
        assert terminal.end() in (0, 1)


def test_without_a_terminal_it_is_the_status(gateway: Double):
    top, status = (here(command, "--gateway", gateway.url) for command in ("top", "status"))
    assert top == status
    assert "host-0" in top.stdout
