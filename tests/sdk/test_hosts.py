"""Several ranks on several hosts, through the public API: ranks are processes, and a host is a directory of its own.

What tells hosts apart is which shared memory they see, so ranks with different RANKMESH_SHM_DIR are on different ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
from support.processes import Me, Ranks

import rankmesh as dist

pytestmark = pytest.mark.processes


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
    me.report(medium=medium(), digest=digest, left=os.listdir(os.environ["RANKMESH_SHM_DIR"]))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("hosts", "env", "expected"),
    [
        ("aabb", {}, "shm+tcp"),
        ("abcab", {}, "shm+tcp"),
        ("abc", {}, "tcp"),
    ],
)
def test_every_call(ranks: Ranks, on: Callable, hosts: str, env: dict[str, str], expected: str) -> None:
    started = ranks.run(make_every_call, len(hosts), env=on(hosts, **env))
    assert {rank.reported["medium"] for rank in started} == {expected}
    assert len({rank.reported["digest"] for rank in started}) == 1, "the same bits everywhere"
    assert not any(rank.reported["left"] for rank in started)


def run_short_of_memory(me: Me) -> None:
    import resource

    if me.rank >= 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))  # enough for what connects ranks of a host
    me.init()
    array = np.ones(100_000)
    dist.all_reduce(array)
    assert (array == me.size).all()
    me.report(medium=medium())
    dist.destroy_process_group()


def test_a_host_without_shared_memory_is_told_in_one_warning_and_the_job_goes_over_tcp(
    ranks: Ranks, on: Callable
) -> None:
    started = ranks.start(run_short_of_memory, 4, env=on("aabb"))
    ranks.wait(started)
    assert [rank.code for rank in started] == [0] * 4, ranks.transcript()
    assert {rank.reported["medium"] for rank in started} == {"tcp"}
    assert started[0].stderr.count("collectives go over TCP, not shared memory") == 1
    assert not any(rank.complaints for rank in started[1:])
