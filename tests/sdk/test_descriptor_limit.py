"""Ranks, stores, the gateway and the launcher where descriptors run out: one error that names the limit, no hang."""

from __future__ import annotations

import os
import resource
from typing import Any

import numpy as np
import pytest
from support.processes import Me, Ranks

import rankmesh as dist

pytestmark = pytest.mark.processes


def leave_spare(spare: int) -> None:
    """Leave this process so many descriptors that it may still open."""
    used = max(map(int, os.listdir("/proc/self/fd")))  # the highest: one of them is the listing's
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, used + spare))


def assert_names_limit(reported: dict[str, Any]) -> None:
    assert "DistNetworkError" in reported["is"], reported
    for word in ("file descriptor", "RLIMIT_NOFILE is", "hard limit", "in use", "ulimit -n"):
        assert word in reported["text"], reported


def join_without_descriptors(me: Me, victim: int, spare: int) -> None:
    if me.rank == victim:
        leave_spare(spare)
    reported = me.attempt(me.init, timeout=30)
    me.report(**reported)
    if reported["error"] is None:
        me.report(**me.attempt(dist.all_reduce, np.ones(1)))
        dist.destroy_process_group()


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("spare", [int(s) for s in os.environ.get("SPARES", "0,4,8,12").split(",")])
def test_a_rank_cannot_join(ranks: Ranks, transport: str, victim: int, spare: int) -> None:
    started = ranks.start(
        join_without_descriptors, 3, env={"RANKMESH_TRANSPORT": transport}, victim=victim, spare=spare
    )
    ranks.wait(started)
    print([(r.reported.get("error"), r.reported.get("ranks"), r.reported.get("seconds")) for r in started])
    print(ranks.transcript()[:6000])
    assert all(rank.code == 0 for rank in started)
    if started[victim].reported["error"] is not None:
        assert_names_limit(started[victim].reported)
