"""Wrong calls that one rank makes while the others make none: nothing may be sent, and no rank may wait.

They are those of the table (support/wrong.py), and here what it does not have: each is a function of the library, and
the rank of two in whose table it stands makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from support.sides import Cells
from support.sweep.over_torch import OverTorch
from support.wrong import MISMATCHED, WRONG, Call, Caller, expressible
from support.wrong_attempts import usable

cell = Cells()

Calls = dict[str, Callable[[Any], Any]]
OURS = ("rankmesh", "over")
INVALID = expressible(WRONG, "torch", "torch.distributed")
WITH_GLOO = expressible(INVALID, "gloo")
MISMATCHES = expressible(MISMATCHED, "torch", "torch.distributed")
"""Calls of the table that tensors and torch's functions have a form for."""


def ones() -> torch.Tensor:
    return torch.ones(4)


AT_RANK_0: Calls = {
    "all_to_all_single of a sparse tensor": lambda dist: dist.all_to_all_single(ones().to_sparse(), ones()),
    "get_global_rank of a rank too high": lambda dist: dist.get_global_rank(subgroup(dist), 1),
    "get_group_rank of a rank that is no member": lambda dist: dist.get_group_rank(subgroup(dist), 1),
    "messages of several groups": lambda dist: dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, ones(), 1), dist.P2POp(dist.isend, ones(), 0, subgroup(dist))]
    ),
    "timeout of a group as a string": lambda dist: dist.new_group([0], timeout="soon"),
    "new_group with a negative timeout": lambda dist: dist.new_group([0], timeout=timedelta(seconds=-1)),
    "new_group with a backend that is not there": lambda dist: dist.new_group([0], backend="xccl"),
    "Backend that is no string": lambda dist: dist.Backend(3),
    "is_backend_available of no string": lambda dist: dist.is_backend_available(3),
    "init_process_group a second time": lambda dist: dist.init_process_group("gloo", rank=0, world_size=2),
}
WITHOUT_GLOO: Calls = {
    "a barrier with a negative timeout": lambda dist: dist.barrier(timeout=timedelta(seconds=-1)),
    "a monitored_barrier with a negative timeout": lambda dist: dist.monitored_barrier(timeout=timedelta(seconds=-1)),
}
"""gloo checks none of these: it crashes, waits until its timeout, or makes the call; so they are not made there."""
AT_RANK_1: Calls = {
    "get_backend of a group of others": lambda dist: dist.get_backend(subgroup(dist)),
}

_subgroups: dict[Any, Any] = {}


def subgroup(dist: Any) -> Any:
    """Return the group of rank 0 alone, which both ranks have made."""
    return _subgroups[dist]


def only(dist: Any, makes_it: bool, call: Callable[[Any], Any]) -> Any:
    """Make a wrong call at one rank, and then a right one at both; gloo's group is not always usable any more."""
    try:
        return call(dist) if makes_it else None
    finally:
        if dist is not torch.distributed:
            dist.all_reduce(tensor := ones())
            assert tensor.tolist() == [2.0] * 4, tensor


@cell(sizes=(2,))
def a_subgroup(dist: Any, rank: int, size: int) -> Any:
    _subgroups[dist] = dist.new_group([0])
    return dist.get_rank(_subgroups[dist])


@cell(sizes=(2,), call=AT_RANK_0)
def at_rank_0(dist: Any, rank: int, size: int, call: str) -> Any:
    return only(dist, rank == 0, AT_RANK_0[call])


@cell(sizes=(2,), call=AT_RANK_1)
def at_rank_1(dist: Any, rank: int, size: int, call: str) -> Any:
    return only(dist, rank == 1, AT_RANK_1[call])


@cell(sizes=(2,), sides=OURS, call=WITHOUT_GLOO)
def without_gloo(dist: Any, rank: int, size: int, call: str) -> Any:
    return only(dist, rank == 0, WITHOUT_GLOO[call])


@cell(sizes=(3,), call=WITH_GLOO)
@cell(sizes=(3,), sides=OURS, call=[name for name in INVALID if name not in WITH_GLOO])
def in_the_table(dist: Any, rank: int, size: int, call: str) -> Any:
    return made(dist, rank, WRONG[call].call) if rank == 1 else made(dist, rank, lambda api, a: None)


@cell(sizes=(3,), sides=OURS, call=MISMATCHES)
def mismatched(dist: Any, rank: int, size: int, call: str) -> Any:
    return made(dist, rank, MISMATCHED[call])


def made(dist: Any, rank: int, call: Call) -> Any:
    """Make a call of the table with tensors; see ``only``."""
    api, caller = OverTorch(dist), Caller(rank)
    try:
        return call(api, caller)
    finally:
        assert caller.unchanged()
        assert dist is torch.distributed or usable(api, rank)
