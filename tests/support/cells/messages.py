"""Point-to-point messages, of tensors and of objects."""

from __future__ import annotations

from typing import Any

import torch

from support.sides import Cells

cell = Cells()

SEVERAL = (2, 3)
DTYPES = [
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
]  # fmt: skip


@cell(sizes=SEVERAL, dtype=DTYPES)
def send_and_recv_round_a_ring(dist: Any, rank: int, size: int, dtype: str) -> Any:
    token = torch.tensor([[1, 0], [rank, 1]]).to(getattr(torch, dtype))
    got = torch.zeros_like(token)
    after, before = (rank + 1) % size, (rank - 1) % size
    if rank == 0:
        returned = dist.send(token, after), dist.recv(got, before)
    else:
        returned = dist.recv(got, before), dist.send(token, after)
    return returned, got


@cell(sizes=SEVERAL, length=[0, 1, 1000, 1_000_000])
def messages_of_every_length(dist: Any, rank: int, size: int, length: int) -> Any:
    if rank == 0:
        return dist.send(torch.arange(length), dst=1)
    if rank == 1:
        got = torch.zeros(length, dtype=torch.int64)
        return dist.recv(got, src=0), got.sum(), got[-3:]
    return None


@cell(sizes=SEVERAL)
def messages_of_one_pair_keep_their_order(dist: Any, rank: int, size: int) -> Any:
    if rank == 0:
        return [dist.send(torch.tensor([number]), 1) for number in range(5)]
    got = [torch.zeros(1, dtype=torch.int64) for _ in range(5)]
    return rank == 1 and ([dist.recv(each, 0) for each in got], got)


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
    """Who comes first is a matter of luck, who comes at all is not."""
    if rank:
        return dist.send(torch.tensor([rank]), 0)
    arrived = []
    for _ in range(size - 1):
        got = torch.zeros(1, dtype=torch.int64)
        sender = dist.recv(got)
        arrived.append((sender, got.item()))
    return sorted(arrived)


@cell(sizes=SEVERAL)
def recv_from_any_rank_with_a_tag(dist: Any, rank: int, size: int) -> Any:
    if rank == 1:
        works = [dist.isend(torch.tensor([tag]), 0, tag=tag) for tag in (1, 2)]
        return [work.wait() for work in works]
    got = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    return rank == 0 and ([dist.recv(got[0], tag=2), dist.recv(got[1], tag=1)], got)


@cell(sizes=SEVERAL)
def isend_and_irecv(dist: Any, rank: int, size: int) -> Any:
    got = torch.zeros(3)
    works = [dist.irecv(got, (rank - 1) % size), dist.isend(torch.full((3,), float(rank)), (rank + 1) % size)]
    return [work.wait() for work in works], got, [work.is_completed() for work in works]


@cell(sizes=SEVERAL)
def irecv_from_any_rank(dist: Any, rank: int, size: int) -> Any:
    if rank == 1:
        return dist.send(torch.tensor([7]), 0)
    if rank == 0:
        got = torch.zeros(1, dtype=torch.int64)
        work = dist.irecv(got)
        return work.wait(), got
    return None


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
    got = torch.zeros(2)
    ops = [
        dist.P2POp(dist.isend, torch.arange(2.0) + rank, (rank + 1) % size),
        dist.P2POp(dist.irecv, got, (rank - 1) % size),
    ]
    works = dist.batch_isend_irecv(ops)
    return [work.wait() for work in works], got


@cell(sizes=SEVERAL)
def batch_isend_irecv_with_tags_and_group_ranks(dist: Any, rank: int, size: int) -> Any:
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


@cell(sizes=SEVERAL)
def send_object_list_and_recv_object_list(dist: Any, rank: int, size: int) -> Any:
    objects: list[Any] = ["text", 12, {1: (2, 3.5)}, None, torch.arange(3)]
    if rank == 0:
        return dist.send_object_list(objects, dst=1)
    if rank == 1:
        got: list[Any] = [None] * len(objects)
        return dist.recv_object_list(got, src=0, device="cpu"), got
    return None
