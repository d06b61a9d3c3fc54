"""Several ranks on several hosts, through the public API: ranks are processes, and a host is a directory of its own.

What tells hosts apart is which shared memory they see, so ranks with different RANKMESH_SHM_DIR are on different ones.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.processes import Me, Ranks

import rankmesh as dist

pytestmark = pytest.mark.processes

SOON = 30.0
"""Seconds within which a failure must be known everywhere, on a busy machine too."""


@pytest.fixture
def on(tmp_path: Path) -> Callable[[str], Callable[[int], dict[str, str]]]:
    """Return what puts ranks on hosts, by a letter for each rank."""

    def place(hosts: str, **variables: str) -> Callable[[int], dict[str, str]]:
        for host in set(hosts):
            (tmp_path / f"shm-{host}").mkdir()
        return lambda rank: {"RANKMESH_SHM_DIR": str(tmp_path / f"shm-{hosts[rank]}"), **variables}

    return place  # type: ignore[return-value]


def medium() -> str:
    """Return what carries the world's collectives."""
    from rankmesh._session.session import communicator_of

    return communicator_of(None).medium


def make_every_call(me: Me) -> None:
    import hashlib

    me.init()
    size, count = me.size, 60_000
    mine = np.random.default_rng(me.rank).normal(size=count)
    everyones = [np.random.default_rng(rank).normal(size=count) for rank in range(size)]
    total = np.sum(everyones, axis=0)
    array = mine.copy()
    dist.all_reduce(array)
    np.testing.assert_allclose(array, total, atol=1e-12)
    digest = hashlib.blake2b(array.tobytes()).hexdigest()
    work = dist.reduce(array := mine.copy(), dst=1, op=dist.ReduceOp.AVG, async_op=True)
    work.wait()
    np.testing.assert_allclose(array, total / size if me.rank == 1 else mine, atol=1e-12)
    array = mine.copy()
    dist.broadcast(array, src=size - 1)
    np.testing.assert_array_equal(array, everyones[-1])
    outputs = [np.empty(count) for _ in range(size)]
    dist.all_gather(outputs, mine)
    np.testing.assert_array_equal(outputs, everyones)
    output = np.empty(count // size)
    dist.reduce_scatter_tensor(output, mine[: count // size * size])
    np.testing.assert_allclose(output, np.split(total[: count // size * size], size)[me.rank], atol=1e-12)
    group = dist.new_group([0, size - 1])
    if me.rank in (0, size - 1):
        array = np.ones(50_000)
        dist.all_reduce(array, group=group)
        assert (array == 2).all()
    shapes = [np.full((3, 5), me.rank, np.int16), np.zeros((40_000, 2))[:, 0], np.array(2.5)]
    for each in shapes:
        dist.all_reduce(each, op=dist.ReduceOp.MAX)
    assert (shapes[0] == size - 1).all()
    dist.barrier()
    me.say(medium=medium(), digest=digest, left=os.listdir(os.environ["RANKMESH_SHM_DIR"]))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("hosts", "env", "expected"),
    [
        ("aabb", {}, "shm+tcp"),
        ("abcab", {}, "shm+tcp"),
        ("aabb", {"RANKMESH_TRANSPORT": "tcp"}, "tcp"),
        ("abc", {}, "tcp"),
    ],
)
def test_every_call(ranks: Ranks, on: Callable, hosts: str, env: dict[str, str], expected: str) -> None:
    started = ranks.run(make_every_call, len(hosts), env=on(hosts, **env), uses=[medium])
    assert {rank.said["medium"] for rank in started} == {expected}
    assert len({rank.said["digest"] for rank in started}) == 1, "the same bits everywhere"
    assert not any(rank.said["left"] for rank in started)


def reduce_for_ever() -> None:
    """Go round in all_reduce until something happens."""
    array = np.ones(400_000)
    while True:
        dist.all_reduce(array)
        array[:] = 1


def reduce_until_killed(me: Me) -> None:
    me.init()
    dist.barrier()
    me.mark(f"going-{me.rank}")
    me.say(**me.attempt(reduce_for_ever))


@pytest.mark.parametrize("victim", [1, 2])
def test_a_rank_that_is_killed_is_named_on_all_hosts_soon(ranks: Ranks, on: Callable, victim: int) -> None:
    started = ranks.start(reduce_until_killed, 4, uses=[reduce_for_ever], env=on("aabb"))
    ranks.wait_for(*(f"going-{rank}" for rank in range(4)))
    time.sleep(0.2)
    killed = started[victim].kill()
    ranks.wait(started)
    assert started[victim].code == -signal.SIGKILL
    for rank in (each for each in started if each is not started[victim]):
        assert rank.said["ranks"] == [victim], rank.said
        assert rank.said["error"] in ("RankFailedError", "GroupAbortedError")
        assert f"pid {started[victim].process.pid}" in rank.said["text"]
        assert "heartbeat" not in rank.said["text"], "for one that is missing they would have waited"
        assert rank.said["at"] - killed < SOON


def be_interrupted(me: Me) -> None:
    me.init()
    dist.barrier()
    if me.rank == 3:
        me.interrupt_when_waiting()
        me.say(**me.attempt(dist.all_reduce, np.ones(100_000)))
    elif me.rank != 0:
        me.say(**me.attempt(dist.all_reduce, np.ones(100_000)))
    else:
        me.wait_for("interrupted")
    if me.rank == 3:
        me.mark("interrupted")


def test_ctrl_c_gets_through(ranks: Ranks, on: Callable) -> None:
    started = ranks.start(be_interrupted, 4, env=on("aabb"))
    ranks.wait(started)
    assert started[3].said["error"] == "KeyboardInterrupt"
    assert started[3].said["at"] - started[3].said["interrupted_at"] < SOON
    for rank in (started[1], started[2]):
        assert rank.said["ranks"] == [3], rank.said


def differ(me: Me) -> None:
    me.init()
    said = me.attempt(dist.all_reduce, np.ones(100_000 + (me.rank == 2)))
    assert said["error"] == "CollectiveMismatchError", said
    array = np.ones(100_000)
    dist.all_reduce(array)
    assert (array == me.size).all()
    me.say(text=said["text"])
    dist.destroy_process_group()


def test_different_calls_are_told_to_every_rank_and_the_group_goes_on(ranks: Ranks, on: Callable) -> None:
    started = ranks.run(differ, 4, env=on("abab"))
    assert len({rank.said["text"] for rank in started}) == 1
    assert "rank 2: all_reduce(float64[100001], SUM)" in started[0].said["text"]


def run_short_of_memory(me: Me) -> None:
    import resource

    if me.rank >= 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))  # enough for what connects ranks of a host
    me.init()
    array = np.ones(100_000)
    dist.all_reduce(array)
    assert (array == me.size).all()
    me.say(medium=medium())
    dist.destroy_process_group()


def test_a_host_without_shared_memory_is_told_in_one_warning_and_the_job_goes_over_tcp(
    ranks: Ranks, on: Callable
) -> None:
    started = ranks.start(run_short_of_memory, 4, env=on("aabb"), uses=[medium])
    ranks.wait(started)
    assert [rank.code for rank in started] == [0] * 4, ranks.told()
    assert {rank.said["medium"] for rank in started} == {"tcp"}
    assert started[0].stderr.count("collectives go over TCP, not shared memory") == 1
    assert not any(rank.stderr for rank in started[1:])
