"""Point-to-point messages, of tensors and of objects, in the forms that torch's own tests do not have."""

from __future__ import annotations

from typing import Any

import torch

from support.sides import Cells

cell = Cells()
SEVERAL = (2, 3)


@cell(sizes=SEVERAL)
def send_and_recv_round_a_ring(dist: Any, rank: int, size: int) -> Any:
    token = torch.tensor([[1, 0], [rank, 1]])
    got = torch.zeros_like(token)
    after, before = (rank + 1) % size, (rank - 1) % size
    if rank == 0:
        returned = dist.send(token, after), dist.recv(got, before)
    else:
        returned = dist.recv(got, before), dist.send(token, after)
    return returned, got


@cell(sizes=SEVERAL)
def tags_tell_messages_apart(dist: Any, rank: int, size: int) -> Any:
    """They are received in another order than they were sent in."""
    if rank == 0:
        works = [dist.isend(torch.tensor([float(tag)]), 1, tag=tag) for tag in (5, 0, 7)]
        return [work.wait() for work in works]
    got = [torch.zeros(1) for _ in range(3)]
    return rank == 1 and ([dist.recv(each, 0, tag=tag) for each, tag in zip(got, (7, 5, 0), strict=True)], got)


@cell(sizes=SEVERAL)
def recv_from_any_rank(dist: Any, rank: int, size: int) -> Any:
    """By tag, and asynchronously."""
    if rank == 1:
        works = [dist.isend(torch.tensor([tag]), 0, tag=tag) for tag in (1, 2, 0)]
        return [work.wait() for work in works]
    got = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
    return rank == 0 and ([dist.recv(got[0], tag=2), dist.recv(got[1], tag=1), dist.irecv(got[2]).wait()], got)


@cell(sizes=SEVERAL)
def peers_by_group_rank(dist: Any, rank: int, size: int) -> Any:
    got = torch.zeros(1)
    after, before = (rank + 1) % size, (rank - 1) % size
    work = dist.isend(torch.tensor([float(rank)]), group_dst=after)
    returned = dist.recv(got, group_src=before)
    work.wait()
    work = dist.irecv(got, group_src=before)
    dist.send(torch.tensor([10.0 * rank]), group_dst=after)
    work.wait()
    return returned, got


@cell(sizes=SEVERAL)
def batch_isend_irecv(dist: Any, rank: int, size: int) -> Any:
    """With tags and group ranks."""
    got = [torch.zeros(1), torch.zeros(1)]
    after, before = (rank + 1) % size, (rank - 1) % size
    ops = [
        dist.P2POp(dist.isend, torch.tensor([rank + 0.25]), group_peer=after, tag=1),
        dist.P2POp(dist.isend, torch.tensor([rank + 0.5]), after, tag=2),
        dist.P2POp(dist.irecv, got[0], before, tag=2),
        dist.P2POp(dist.irecv, got[1], group_peer=before, tag=1),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return got, [(op.peer, op.group_peer, op.tag) for op in ops]


@cell(sizes=SEVERAL, root=[{"src": 0}, {"group_src": 0}, {"src": 0, "use_batch": False}])
def send_object_list_and_recv_object_list(dist: Any, rank: int, size: int, root: dict[str, Any]) -> Any:
    objects: list[Any] = ["text", 12, {1: (2, 3.5)}, None, torch.arange(3)]
    if rank == 0:
        return dist.send_object_list(objects, dst=1)
    got: list[Any] = [None] * len(objects)
    return rank == 1 and (dist.recv_object_list(got, device="cpu", **root), got)
