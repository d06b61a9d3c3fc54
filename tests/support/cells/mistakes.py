"""Wrong calls that one rank of two makes while the other makes none: nothing may be sent, and nobody may wait.

Each is a function of the library; the rank in whose table it stands makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from support.sides import Cells

cell = Cells()

Calls = dict[str, Callable[[Any], Any]]


def ones(count: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(count, dtype=dtype)


def two() -> list[torch.Tensor]:
    return [ones(), ones()]


TENSORS: Calls = {
    "all_reduce of a number": lambda dist: dist.all_reduce(3.0),
    "all_reduce of a list": lambda dist: dist.all_reduce([1.0, 2.0]),
    "all_reduce of None": lambda dist: dist.all_reduce(None),
    "reduce of a list": lambda dist: dist.reduce([1.0], 0),
    "broadcast of a string": lambda dist: dist.broadcast("text", 0),
    "all_gather of a list": lambda dist: dist.all_gather(two(), [1.0]),
    "all_gather into a tensor": lambda dist: dist.all_gather(ones(2), ones(1)),
    "all_gather into numbers": lambda dist: dist.all_gather([1.0, 2.0], ones()),
    "all_gather into None": lambda dist: dist.all_gather(None, ones()),
    "all_gather_into_tensor into a list": lambda dist: dist.all_gather_into_tensor(two(), ones()),
    "gather of a list": lambda dist: dist.gather([1.0], two(), 0),
    "gather into numbers": lambda dist: dist.gather(ones(), [1.0, 2.0], 0),
    "scatter into a list": lambda dist: dist.scatter([1.0], two(), 0),
    "scatter of numbers": lambda dist: dist.scatter(ones(), [1.0, 2.0], 0),
    "reduce_scatter of a tensor": lambda dist: dist.reduce_scatter(ones(), ones(8)),
    "reduce_scatter into None": lambda dist: dist.reduce_scatter(None, two()),
    "reduce_scatter_tensor of a list": lambda dist: dist.reduce_scatter_tensor(ones(), two()),
    "all_to_all of a tensor": lambda dist: dist.all_to_all(two(), ones(2)),
    "all_to_all into numbers": lambda dist: dist.all_to_all([1.0, 2.0], two()),
    "all_to_all_single of a list": lambda dist: dist.all_to_all_single(ones(), [1.0] * 4),
    "send of a number": lambda dist: dist.send(1.0, 1),
    "recv into a list": lambda dist: dist.recv([0.0], 1),
    "isend of None": lambda dist: dist.isend(None, 1),
    "irecv into a string": lambda dist: dist.irecv("text", 1),
    "all_reduce of a sparse tensor": lambda dist: dist.all_to_all_single(ones().to_sparse(), ones()),
    "all_reduce_coalesced of a number": lambda dist: dist.all_reduce_coalesced([1.0]),
    "all_gather_coalesced into a flat list": lambda dist: dist.all_gather_coalesced(two(), [ones()]),
}
RANKS: Calls = {
    "broadcast from a rank too high": lambda dist: dist.broadcast(ones(), 2),
    "broadcast from rank -1": lambda dist: dist.broadcast(ones(), -1),
    "broadcast from a group rank too high": lambda dist: dist.broadcast(ones(), group_src=2),
    "broadcast from nowhere": lambda dist: dist.broadcast(ones()),
    "broadcast from two sources": lambda dist: dist.broadcast(ones(), src=0, group_src=0),
    "broadcast from a string": lambda dist: dist.broadcast(ones(), "0"),
    "broadcast from a float": lambda dist: dist.broadcast(ones(), 0.0),
    "reduce to a rank too high": lambda dist: dist.reduce(ones(), 2),
    "reduce to a string": lambda dist: dist.reduce(ones(), "0"),
    "reduce to nowhere": lambda dist: dist.reduce(ones()),
    "gather at a rank too high": lambda dist: dist.gather(ones(), None, 7),
    "scatter from a rank too high": lambda dist: dist.scatter(ones(), None, 7),
    "send to nowhere": lambda dist: dist.send(ones()),
    "send to two ranks": lambda dist: dist.send(ones(), dst=1, group_dst=1),
    "send to oneself": lambda dist: dist.send(ones(), 0),
    "send to oneself by group rank": lambda dist: dist.send(ones(), group_dst=0),
    "a message to nowhere": lambda dist: dist.P2POp(dist.isend, ones()),
    "get_global_rank of a rank too high": lambda dist: dist.get_global_rank(subgroup(dist), 1),
    "get_group_rank of a rank that is no member": lambda dist: dist.get_group_rank(subgroup(dist), 1),
    "broadcast_object_list from a rank too high": lambda dist: dist.broadcast_object_list([1], 2),
    "scatter_object_list from a rank too high": lambda dist: dist.scatter_object_list([None], None, 2),
    "send_object_list to oneself": lambda dist: dist.send_object_list([1], 0),
    "isend to oneself": lambda dist: dist.isend(ones(), 0).wait(),
    "irecv from oneself": lambda dist: dist.irecv(ones(), 0).wait(),
    "recv from oneself": lambda dist: dist.recv(ones(), 0),
}
LISTS: Calls = {
    "all_gather into a list too short": lambda dist: dist.all_gather([ones()], ones()),
    "all_gather into a list too long": lambda dist: dist.all_gather([*two(), ones()], ones()),
    "all_gather into an empty list": lambda dist: dist.all_gather([], ones()),
    "gather without a list": lambda dist: dist.gather(ones(), None, 0),
    "gather into an empty list": lambda dist: dist.gather(ones(), [], 0),
    "gather into a list too short": lambda dist: dist.gather(ones(), [ones()], 0),
    "scatter without a list": lambda dist: dist.scatter(ones(), None, 0),
    "scatter of an empty list": lambda dist: dist.scatter(ones(), [], 0),
    "scatter of a list too long": lambda dist: dist.scatter(ones(), [*two(), ones()], 0),
    "reduce_scatter of a list too short": lambda dist: dist.reduce_scatter(ones(), [ones()]),
    "all_to_all of a list too short": lambda dist: dist.all_to_all(two(), [ones()]),
    "all_to_all into a list too short": lambda dist: dist.all_to_all([ones()], two()),
    "gather_object without a list": lambda dist: dist.gather_object(1, None, 0),
    "scatter_object_list without a list": lambda dist: dist.scatter_object_list([None], None, 0),
    "scatter_object_list into an empty list": lambda dist: dist.scatter_object_list([], [1, 2], 0),
    "no messages": lambda dist: dist.batch_isend_irecv([]),
    "messages that are none": lambda dist: dist.batch_isend_irecv([1, 2]),
    "messages of several groups": lambda dist: dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, ones(), 1), dist.P2POp(dist.isend, ones(), 0, subgroup(dist))]
    ),
    "a message that is no function": lambda dist: dist.P2POp("isend", ones(), 1),
    "a message with the blocking function": lambda dist: dist.P2POp(dist.send, ones(), 1),
}
SIZES: Calls = {
    "all_gather into other sizes": lambda dist: dist.all_gather([ones(3), ones(3)], ones(4)),
    "all_gather into another dtype": lambda dist: dist.all_gather([ones(4, torch.int64), ones(4, torch.int64)], ones()),
    "all_gather into two dtypes": lambda dist: dist.all_gather([ones(), ones(4, torch.int64)], ones()),
    "all_gather_into_tensor of another size": lambda dist: dist.all_gather_into_tensor(ones(7), ones(4)),
    "all_gather_into_tensor of another dtype": lambda dist: dist.all_gather_into_tensor(ones(8, torch.int64), ones()),
    "gather into other sizes": lambda dist: dist.gather(ones(4), [ones(4), ones(3)], 0),
    "gather into another dtype": lambda dist: dist.gather(ones(), [ones(4, torch.float64), ones(4, torch.float64)], 0),
    "scatter of other sizes": lambda dist: dist.scatter(ones(4), [ones(4), ones(3)], 0),
    "scatter of another dtype": lambda dist: dist.scatter(ones(), [ones(4, torch.int8), ones(4, torch.int8)], 0),
    "reduce_scatter of another size": lambda dist: dist.reduce_scatter(ones(4), [ones(3), ones(3)]),
    "reduce_scatter of another dtype": lambda dist: dist.reduce_scatter(ones(), [ones(4, torch.int8), ones()]),
    "reduce_scatter_tensor of another size": lambda dist: dist.reduce_scatter_tensor(ones(4), ones(7)),
    "reduce_scatter_tensor of another dtype": lambda dist: dist.reduce_scatter_tensor(ones(4), ones(8, torch.int64)),
    "all_to_all of another dtype": lambda dist: dist.all_to_all(two(), [ones(4, torch.int64), ones(4, torch.int64)]),
    "all_to_all_single of another dtype": lambda dist: dist.all_to_all_single(ones(4), ones(4, torch.int64)),
    "all_to_all_single with too few splits": lambda dist: dist.all_to_all_single(ones(4), ones(4), [4], [2, 2]),
    "all_to_all_single with too many splits": lambda dist: dist.all_to_all_single(ones(4), ones(4), [1, 1, 2], [2, 2]),
    "all_to_all_single with splits of another sum": lambda dist: dist.all_to_all_single(
        ones(4), ones(4), [2, 2], [2, 1]
    ),
    "all_to_all_single with a negative split": lambda dist: dist.all_to_all_single(ones(4), ones(4), [2, 2], [5, -1]),
    "all_to_all_single with splits that are no numbers": lambda dist: dist.all_to_all_single(
        ones(4), ones(4), ["2", "2"], [2, 2]
    ),
}
ARGUMENTS: Calls = {
    "op as a string": lambda dist: dist.all_reduce(ones(), "sum"),
    "op as a number": lambda dist: dist.all_reduce(ones(), op=99),
    "op as None": lambda dist: dist.all_reduce(ones(), op=None),
    "reduce with op as a string": lambda dist: dist.reduce(ones(), 0, "sum"),
    "reduce_scatter with op as a string": lambda dist: dist.reduce_scatter(ones(), two(), "sum"),
    "PREMUL_SUM without a factor": lambda dist: dist.all_reduce(ones(), op=dist.ReduceOp.PREMUL_SUM),
    "group as a string": lambda dist: dist.all_reduce(ones(), group="world"),
    "group as a number": lambda dist: dist.broadcast(ones(), 0, group=1),
    "group as a list of ranks": lambda dist: dist.barrier(group=[0, 1]),
    "get_rank of a string": lambda dist: dist.get_rank("world"),
    "get_world_size of a number": lambda dist: dist.get_world_size(7),
    "get_backend of a string": lambda dist: dist.get_backend("world"),
    "get_process_group_ranks of a string": lambda dist: dist.get_process_group_ranks("world"),
    "get_group_rank in a string": lambda dist: dist.get_group_rank("world", 0),
    "destroy_process_group of a string": lambda dist: dist.destroy_process_group("world"),
    "tag as a string": lambda dist: dist.send(ones(), 1, tag="one"),
    "tag as a float": lambda dist: dist.isend(ones(), 1, tag=1.5),
    "tag as None": lambda dist: dist.irecv(ones(), 1, tag=None),
    "timeout of a barrier as a string": lambda dist: dist.barrier(timeout="soon"),
    "timeout of a group as a string": lambda dist: dist.new_group([0], timeout="soon"),
    "new_group with a negative timeout": lambda dist: dist.new_group([0], timeout=timedelta(seconds=-1)),
    "new_group with a rank too high": lambda dist: dist.new_group([0, 2]),
    "new_group with rank -1": lambda dist: dist.new_group([-1, 0]),
    "new_group with a rank twice": lambda dist: dist.new_group([0, 0]),
    "new_group with strings": lambda dist: dist.new_group(["a", "b"]),
    "new_group with a number": lambda dist: dist.new_group(1),
    "new_group with an unknown backend": lambda dist: dist.new_group([0], backend="smoke-signals"),
    "new_group with a backend that is not there": lambda dist: dist.new_group([0], backend="nccl"),
    "new_subgroups that do not divide": lambda dist: dist.new_subgroups(group_size=3),
    "new_subgroups of nobody": lambda dist: dist.new_subgroups(group_size=0),
    "new_subgroups_by_enumeration of nobody": lambda dist: dist.new_subgroups_by_enumeration([]),
    "Backend that is no string": lambda dist: dist.Backend(3),
    "is_backend_available of no string": lambda dist: dist.is_backend_available(3),
    "init_process_group a second time": lambda dist: dist.init_process_group("gloo", rank=0, world_size=2),
    "broadcast_object_list through a device": lambda dist: dist.broadcast_object_list([1], 0, device="nowhere"),
}
WITHOUT_GLOO: Calls = {
    "a barrier with a negative timeout": lambda dist: dist.barrier(timeout=timedelta(seconds=-1)),
    "a monitored_barrier with a negative timeout": lambda dist: dist.monitored_barrier(timeout=timedelta(seconds=-1)),
    "all_to_all_single that does not divide": lambda dist: dist.all_to_all_single(ones(5), ones(5)),
    "send to a rank too high": lambda dist: dist.send(ones(), 2),
    "send to rank -1": lambda dist: dist.send(ones(), -1),
    "recv from a rank too high": lambda dist: dist.recv(ones(), 2),
    "broadcast of a tensor on another device": lambda dist: dist.broadcast(torch.ones(2, device="meta"), 0),
    "all_reduce of an expanded tensor": lambda dist: dist.all_reduce(ones(1).expand(4)),
}
"""gloo checks none of these: it crashes, waits until its timeout, or makes the call; so they are not made there."""
AT_RANK_0: Calls = {**TENSORS, **RANKS, **LISTS, **SIZES, **ARGUMENTS}

AT_RANK_1: Calls = {
    "gather with a list at a rank that does not gather": lambda dist: dist.gather(ones(), two(), 0),
    "scatter with a list at a rank that does not scatter": lambda dist: dist.scatter(ones(), two(), 0),
    "gather into a list at a rank that does not gather": lambda dist: dist.gather_object(1, [None, None], 0),
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


@cell(sizes=(2,), call=WITHOUT_GLOO)
def without_gloo(dist: Any, rank: int, size: int, call: str) -> Any:
    return None if dist is torch.distributed else only(dist, rank == 0, WITHOUT_GLOO[call])
