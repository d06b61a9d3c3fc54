"""Joining and leaving: what is there before, meanwhile and after, in worlds of one rank."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rankmesh as dist

NEEDS_A_WORLD = {
    "all_reduce": lambda: dist.all_reduce(np.ones(1)),
    "barrier": dist.barrier,
    "send": lambda: dist.send(np.ones(1), 0),
    "recv": lambda: dist.recv(np.ones(1), 0),
    "isend": lambda: dist.isend(np.ones(1), 0),
    "irecv": lambda: dist.irecv(np.ones(1)),
    "broadcast": lambda: dist.broadcast(np.ones(1), 0),
    "all_gather": lambda: dist.all_gather([np.ones(1)], np.ones(1)),
    "batch": lambda: dist.batch().__enter__(),
    "all_gather_object": lambda: dist.all_gather_object([None], 1),
    "get_rank": dist.get_rank,
    "get_world_size": dist.get_world_size,
    "get_backend": dist.get_backend,
    "get_process_group_ranks": dist.get_process_group_ranks,
    "get_pg_count": dist.get_pg_count,
    "new_group": dist.new_group,
    "new_subgroups": lambda: dist.new_subgroups(1),
    "new_subgroups_by_enumeration": lambda: dist.new_subgroups_by_enumeration([[0]]),
    "split_group": lambda: dist.split_group(None, [[0]]),
    "shrink_group": lambda: dist.shrink_group([0]),
    "destroy_process_group": dist.destroy_process_group,
}


def join(folder: Path, **options: Any) -> None:
    """Make a world of one rank."""
    dist.init_process_group(**{"init_method": f"file://{folder}/meet", "rank": 0, "world_size": 1, **options})


def test_it_is_there() -> None:
    assert dist.is_available() is True
    assert dist.default_pg_timeout == timedelta(minutes=30)


@pytest.mark.parametrize("call", NEEDS_A_WORLD.values(), ids=NEEDS_A_WORLD)
def test_without_a_world_every_call_says_what_to_do(call: Any) -> None:
    assert not dist.is_initialized()
    assert dist.group.WORLD is None
    assert dist.GroupMember.WORLD is None
    with pytest.raises(ValueError, match=r"call init_process_group\(\) first"):
        call()


@pytest.mark.parametrize("backend", [None, "mesh", "gloo", "tcp", "cpu:gloo,cuda:nccl", "GLOO", dist.Backend.GLOO])
def test_scripts_written_for_gloo_run(tmp_path: Path, backend: str | None) -> None:
    join(tmp_path, backend=backend)
    assert dist.is_initialized()
    assert dist.get_backend() == "mesh"
    dist.destroy_process_group()
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"backend": "xccl"}, dist.DistBackendError, "use 'gloo'"),
        ({"timeout": "soon"}, TypeError, "timeout"),
    ],
    ids=str,
)
def test_a_wrong_argument_joins_nothing(tmp_path: Path, options: Any, error: type[Exception], says: str) -> None:
    threads = set(threading.enumerate())
    with pytest.raises(error, match=says):
        join(tmp_path, **options)
    assert not dist.is_initialized()
    assert not (tmp_path / "meet").exists()
    assert set(threading.enumerate()) <= threads


def test_a_world_is_joined_once_at_a_time(tmp_path: Path) -> None:
    join(tmp_path)
    with pytest.raises(ValueError, match=r"call destroy_process_group\(\) first"):
        join(tmp_path)
    dist.barrier()
    dist.destroy_process_group()
    (tmp_path / "second").mkdir()
    join(tmp_path / "second")
    dist.barrier()
    dist.destroy_process_group()


def test_the_timeout_of_the_world_is_that_of_its_groups(tmp_path: Path) -> None:
    join(tmp_path, timeout=timedelta(seconds=4))
    groups = (None, dist.new_group([0]), dist.split_group(None, [[0]]), dist.new_subgroups(1)[0])
    for work in [dist.irecv(np.ones(1), group=group) for group in groups]:
        with pytest.raises(dist.CollectiveTimeoutError, match=r"waited 4\.0 s"):
            work.wait()
    dist.destroy_process_group()


def test_groups_of_a_world_that_ended_say_so(tmp_path: Path) -> None:
    join(tmp_path)
    world, group = dist.group.WORLD, dist.new_group([0])
    dist.destroy_process_group(world)
    for ended in (world, group):
        with pytest.raises(dist.GroupAbortedError, match="destroyed"):
            dist.barrier(group=ended)
    with pytest.raises(ValueError, match=r"init_process_group\(\) first"):
        dist.barrier()
    assert dist.group.WORLD is None


def test_leaving_ends_the_threads(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    join(tmp_path)
    work = dist.barrier(async_op=True)
    assert work is not None
    work.wait()
    dist.destroy_process_group()
    assert set(threading.enumerate()) <= before


def test_ranks_outside_a_group_have_nothing_to_leave() -> None:
    assert dist.destroy_process_group(dist.GroupMember.NON_GROUP_MEMBER) is None
