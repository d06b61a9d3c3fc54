"""The tests' own tools: how ranks as processes are watched."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path

import pytest
from support.processes import DEADLINE, Me, Ranks, free_port, wait_until

pytestmark = pytest.mark.processes


def test_free_ports() -> None:
    ports = [free_port() for _ in range(20)]
    assert len(set(ports)) > 15
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_a_host_that_is_none_has_no_free_port() -> None:
    with pytest.raises(OSError, match="assign"):
        free_port("192.0.2.1")


def mark_or_fail(me: Me) -> None:
    if me.rank == 1:
        me.wait_for("there")
        raise SystemExit("no luck")
    me.mark("there")
    me.wait_for("never")


def test_waiting_for_a_mark_fails_as_soon_as_a_rank_has(ranks: Ranks) -> None:
    began = time.monotonic()
    zero, one = ranks.start(mark_or_fail, 2)
    with pytest.raises(AssertionError, match=r"(?s)1-rank-1 ended; the marks \['never-made'\] .*no luck"):
        ranks.wait_for("there", "never-made")
    assert time.monotonic() - began < DEADLINE
    assert (zero.code, one.code) == (None, 1)
    zero.kill()
    ranks.wait([zero])


def test_a_rank_that_fails_ends_the_waits_of_those_that_have_to_succeed(ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match=r"(?s)^1-rank-1 failed first:.*another rank failed .* 'never'.*no luck"):
        ranks.run(mark_or_fail, 2)


def mark(me: Me) -> None:
    me.mark(f"made-{me.rank}")


def test_waiting_for_a_mark_that_nobody_can_make_any_more_fails(ranks: Ranks) -> None:
    ranks.start(mark, 2)
    ranks.wait_for("made-0", "made-1")
    with pytest.raises(AssertionError, match=r"0-rank-0, 1-rank-1 ended; the marks \['made-2'\]"):
        ranks.wait_for("made-2")


def sleep(me: Me) -> None:
    me.mark(f"made-{me.rank}")
    me.wait_for("end")
    me.mark(f"ended-{me.rank}")


def test_a_rank_that_the_test_killed_is_no_failure(ranks: Ranks) -> None:
    zero, one = ranks.start(sleep, 2)
    ranks.wait_for("made-0", "made-1")
    zero.kill()
    ranks.wait([zero])
    ranks.mark("end")
    ranks.wait_for("ended-1")
    ranks.succeed([one])


def test_a_rank_that_ends_as_the_test_kills_it(ranks: Ranks) -> None:
    (rank,) = ranks.start(mark, 1)
    ranks.wait_for("made-0")
    # The server of ranks has waited for it, and the test has not read that yet.
    wait_until(lambda: not Path(f"/proc/{rank.pid}").exists(), "the rank's end")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank.process, "poll", lambda: None)
        rank.process.send_signal(signal.SIGKILL)
    assert rank.process.wait() == 0
