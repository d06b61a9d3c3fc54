"""Groups and names, beyond torch's own tests and tests/sdk/session/test_groups.py."""

from __future__ import annotations

from typing import Any

import torch

from support.sides import Cells

cell = Cells()

SEVERAL = (2, 3)


def asked(dist: Any, group: Any) -> Any:
    """Return what can be asked about a group at every rank."""
    return dist.get_rank(group), dist.get_world_size(group)


def is_member(dist: Any, group: Any) -> bool:
    return group is not dist.GroupMember.NON_GROUP_MEMBER


@cell(sizes=SEVERAL)
def only_the_members_make_the_group(dist: Any, rank: int, size: int) -> Any:
    """Rank 0 makes one of its own: torch 2.14 needs as many of these at each rank, or it waits in the next group."""
    group = dist.new_group([0] if rank == 0 else list(range(1, size)), use_local_synchronization=True)
    tensor = torch.tensor([rank])
    dist.all_reduce(tensor, group=group)
    return asked(dist, group), tensor


@cell(sizes=(3,))
def collectives_at_a_rank_that_is_no_member(dist: Any, rank: int, size: int) -> Any:
    """They return None, and leave everything as it was."""
    group = dist.new_group([0, 1])
    if rank < 2:
        return None
    tensor, listed, objects = torch.tensor([7]), [torch.tensor([7])], ["as it was"]
    returned = [
        dist.all_reduce(tensor, group=group),
        dist.broadcast(tensor, 0, group),
        dist.reduce(tensor, 0, group=group),
        dist.all_gather(listed, tensor, group),
        dist.gather(tensor, None, 0, group),
        dist.scatter(tensor, None, 0, group),
        dist.reduce_scatter(tensor, listed, group=group),
        dist.all_to_all(listed, listed, group),
        dist.barrier(group),
        dist.all_reduce(tensor, group=group, async_op=True),
        dist.all_gather_object(objects, 1, group),
        dist.broadcast_object_list(objects, 0, group),
        dist.irecv(tensor, 0, group),
        dist.recv(tensor, 0, group),
    ]
    return returned, tensor, listed, objects


@cell()
def backends_by_name(dist: Any, rank: int, size: int) -> Any:
    names = ["GLOO", "NCCL", "MPI", "UCC", "UNDEFINED"]
    return (
        [str(getattr(dist.Backend, name)) for name in names],
        (dist.Backend("GLOO") == "gloo", dist.Backend("Gloo") == dist.Backend.GLOO),
        # NCCL and MPI are another matter: theirs are built in, ours are there when they are installed.
        dist.is_gloo_available(),
        (dist.is_backend_available("gloo"), dist.is_torchelastic_launched()),
    )


@cell(sizes=(1,))
def operations_by_name(dist: Any, rank: int, size: int) -> Any:
    names = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"]
    ops = [getattr(dist.ReduceOp, name) for name in names]
    return [(str(op), f"{op}") for op in ops], ops[0] == dist.reduce_op.SUM, ops[0] != ops[1], len({*ops, ops[0]})


@cell(sizes=SEVERAL)
def send_in_a_group_of_other_ranks(dist: Any, rank: int, size: int) -> Any:
    group = dist.new_group([size - 1])
    if is_member(dist, group):
        return None
    try:
        dist.send(torch.ones(1), group=group, group_dst=0)
    except ValueError:
        return "ValueError"
