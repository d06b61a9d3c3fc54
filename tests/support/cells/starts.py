"""Wrong beginnings, and calls before the beginning or after the end; in processes that are in no job."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from support.processes import free_port
from support.sides import Cells

cell = Cells()

Calls = dict[str, Callable[[Any], Any]]
_numbers = itertools.count()


def ones() -> torch.Tensor:
    return torch.ones(2)


UNINITIALIZED: Calls = {
    "all_reduce": lambda dist: dist.all_reduce(ones()),
    "all_reduce asynchronously": lambda dist: dist.all_reduce(ones(), async_op=True),
    "reduce": lambda dist: dist.reduce(ones(), 0),
    "broadcast": lambda dist: dist.broadcast(ones(), 0),
    "all_gather": lambda dist: dist.all_gather([ones()], ones()),
    "all_gather_into_tensor": lambda dist: dist.all_gather_into_tensor(ones(), ones()),
    "gather": lambda dist: dist.gather(ones(), [ones()]),
    "scatter": lambda dist: dist.scatter(ones(), [ones()]),
    "reduce_scatter": lambda dist: dist.reduce_scatter(ones(), [ones()]),
    "all_to_all": lambda dist: dist.all_to_all([ones()], [ones()]),
    "all_to_all_single": lambda dist: dist.all_to_all_single(ones(), ones()),
    "barrier": lambda dist: dist.barrier(),
    "monitored_barrier": lambda dist: dist.monitored_barrier(),
    "send": lambda dist: dist.send(ones(), 1),
    "recv": lambda dist: dist.recv(ones(), 1),
    "isend": lambda dist: dist.isend(ones(), 1),
    "irecv": lambda dist: dist.irecv(ones(), 1),
    "all_gather_object": lambda dist: dist.all_gather_object([None], 1),
    "broadcast_object_list": lambda dist: dist.broadcast_object_list([1]),
    "gather_object": lambda dist: dist.gather_object(1, [None]),
    "scatter_object_list": lambda dist: dist.scatter_object_list([None], [1]),
    "new_group": lambda dist: dist.new_group([0]),
    "new_subgroups": lambda dist: dist.new_subgroups(1),
    "get_rank": lambda dist: dist.get_rank(),
    "get_world_size": lambda dist: dist.get_world_size(),
    "get_backend": lambda dist: dist.get_backend(),
    "get_process_group_ranks": lambda dist: dist.get_process_group_ranks(None),
    "destroy_process_group": lambda dist: dist.destroy_process_group(),
    "a batch": lambda dist: dist._coalescing_manager().__enter__(),
}
"""Calls of a process that is in no job."""

WRONG_STARTS: Calls = {
    "an unknown backend": lambda dist: start(dist, "smoke-signals"),
    "a backend that is not there": lambda dist: start(dist, "xccl"),
    "a backend that is no string": lambda dist: start(dist, 3),
    "an unknown scheme": lambda dist: start(dist, init_method="carrier-pigeon://here"),
    "an init_method that is no string": lambda dist: start(dist, init_method=7),
    "tcp without a rank": lambda dist: start(dist, init_method=f"tcp://127.0.0.1:{free()}", rank=-1),
    "tcp without a world size": lambda dist: start(dist, init_method=f"tcp://127.0.0.1:{free()}", world_size=-1),
    "a file without a rank": lambda dist: start(dist, rank=-1),
    "a file without a world size": lambda dist: start(dist, world_size=-1),
    "a store without a rank": lambda dist: start(dist, store=dist.HashStore(), rank=-1),
    "a store without a world size": lambda dist: start(dist, store=dist.HashStore(), world_size=-1),
    "a store and an init_method": lambda dist: start(dist, store=dist.HashStore(), init_method="env://"),
    "no RANK": lambda dist: from_environment(dist, WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=free()),
    "no WORLD_SIZE": lambda dist: from_environment(dist, RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=free()),
    "no MASTER_ADDR": lambda dist: from_environment(dist, RANK="0", WORLD_SIZE="1", MASTER_PORT=free()),
    "no MASTER_PORT": lambda dist: from_environment(dist, RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1"),
    "RANK that is no number": lambda dist: from_environment(
        dist, RANK="first", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=free()
    ),
    "a timeout that is a string": lambda dist: start(dist, timeout="soon"),
    "others that do not come": lambda dist: start(dist, world_size=2, timeout=timedelta(seconds=0.5)),
}
"""Ways to call init_process_group that cannot work."""


def start(dist: Any, backend: Any = "gloo", **options: Any) -> None:
    """Begin as the only rank, but for what the options say."""
    defaults = {"rank": 0, "world_size": 1}
    if "store" not in options:
        defaults["init_method"] = f"file://{Path.cwd()}/start-{next(_numbers)}"
    dist.init_process_group(backend, **{**defaults, **options})


def free() -> str:
    return str(free_port())


def from_environment(dist: Any, **variables: str) -> None:
    with environment(variables):
        dist.init_process_group("gloo")


@contextmanager
def environment(variables: dict[str, str]) -> Any:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@cell(sizes=(0,))
def questions_before_the_beginning(dist: Any, rank: int, size: int) -> Any:
    return dist.is_initialized(), dist.is_available(), dist.group.WORLD, dist.GroupMember.WORLD


@cell(sizes=(0,), call=UNINITIALIZED)
def before_the_beginning(dist: Any, rank: int, size: int, call: str) -> Any:
    return UNINITIALIZED[call](dist)


@cell(sizes=(0,), call=WRONG_STARTS)
def a_wrong_start(dist: Any, rank: int, size: int, call: str) -> Any:
    try:
        WRONG_STARTS[call](dist)
    except Exception:
        assert not dist.is_initialized()
        raise
    dist.destroy_process_group()
    return "it began"


@cell(sizes=(0,))
def the_end(dist: Any, rank: int, size: int) -> Any:
    start(dist)
    during = dist.is_initialized()
    dist.destroy_process_group()
    return during, dist.is_initialized(), dist.group.WORLD


@cell(sizes=(0,), call=UNINITIALIZED)
def after_the_end(dist: Any, rank: int, size: int, call: str) -> Any:
    return UNINITIALIZED[call](dist)


@cell(sizes=(0,), calls=["init_process_group", "a collective of a destroyed group", "destroying a group twice"])
def in_a_job_of_one(dist: Any, rank: int, size: int, calls: str) -> Any:
    """That a job can begin again after its end is shown on the way."""
    start(dist)
    try:
        group = dist.new_group([0])
        if calls == "init_process_group":
            return start(dist)
        dist.destroy_process_group(group)
        return dist.all_reduce(ones(), group=group) if "collective" in calls else dist.destroy_process_group(group)
    finally:
        dist.destroy_process_group()
