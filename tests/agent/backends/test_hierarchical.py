"""A group on several hosts: what passes between them, what is reported of wrong calls, and how it fails."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.threads import NOW, World, world

from rankmesh_agent.backends import registered
from rankmesh_agent.backends.cpu import HierarchicalCpuBackend
from rankmesh_agent.collectives import all_gather, all_reduce, broadcast, hosts, leaders, reduce, reduce_scatter
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.transports.base import Buffer
from rankmesh_agent.transports.tcp_connection import TcpConnection
from rankmesh_agent.wire.errors import GroupAbortedError
from rankmesh_agent.wire.ops import Call, OpType, ReduceOp

Array = np.ndarray[Any, Any]
COUNT = 300_000
"""Elements of a test's arrays: enough that headers do not count."""


@pytest.fixture
def quartet() -> Iterator[World]:
    """Two hosts of two ranks, which are not in a row: ranks 0 and 2 share one."""
    with world(4, "tcp", hosts="abab") as made:
        yield made


# Bytes between hosts


def sent_between_hosts(ranks: World, call: Callable[[LocalCommunicator], Any]) -> Counter[str]:
    """Make a call on all ranks; return the bytes that left each host."""
    homes = {
        id(peer.connection): (ranks.hosts[mesh.rank], ranks.hosts[rank])
        for mesh in ranks.meshes
        for rank, peer in mesh._peers.items()
    }
    left: Counter[str] = Counter()
    lock = threading.Lock()
    send = TcpConnection.send

    def counting(connection: TcpConnection, buffers: list[Buffer]) -> int:
        sent = send(connection, buffers)
        here, there = homes[id(connection)]
        if here != there:
            with lock:
                left[here] += sent
        return sent

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TcpConnection, "send", counting)
        ranks.run(call)
    return left


def make(kind: OpType, dtype: type) -> Callable[[LocalCommunicator], Any]:
    """Return the call of a collective on arrays of COUNT elements; those for each rank are as many together."""

    def call(members: LocalCommunicator) -> None:
        array = np.ones(COUNT, dtype)
        split = np.split(array, members.size)
        match kind:
            case OpType.ALL_REDUCE:
                members.all_reduce(array, ReduceOp.SUM, NOW)
            case OpType.REDUCE:
                members.reduce(array, ReduceOp.SUM, 0, NOW)
            case OpType.BROADCAST:
                members.broadcast(array, 0, NOW)
            case OpType.ALL_GATHER:
                members.all_gather(split, split[members.rank].copy(), NOW)
            case OpType.REDUCE_SCATTER:
                members.reduce_scatter(np.empty_like(split[0]), split, ReduceOp.SUM, NOW)

    return call


FLAT = {
    OpType.ALL_REDUCE: all_reduce.direct_link,
    OpType.REDUCE: reduce.direct_link,
    OpType.BROADCAST: broadcast.scatter_link,
    OpType.ALL_GATHER: all_gather.direct_link,
    OpType.REDUCE_SCATTER: reduce_scatter.direct_link,
}
LAYOUTS = ("aabb", "aaab", "aabbcc", "abab")


@pytest.mark.parametrize("hosts", LAYOUTS)
@pytest.mark.parametrize("kind", FLAT, ids=lambda kind: kind.name.lower())
def test_fewer_bytes_pass_between_hosts_than_without_them(
    kind: OpType, hosts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world(len(hosts), "tcp", hosts=hosts) as ranks:
        ours = sent_between_hosts(ranks, make(kind, np.float32))
    monkeypatch.setattr(HierarchicalCpuBackend, "algorithm", lambda self, call: FLAT[call.kind])
    with world(len(hosts), "tcp", hosts=hosts) as ranks:
        flat = sent_between_hosts(ranks, make(kind, np.float32))
    assert ours.total() < 0.75 * flat.total()


@pytest.mark.parametrize(("dtype", "wide"), [(np.float32, 1), (np.float16, 2), (np.int8, 1)], ids=str)
@pytest.mark.parametrize("hosts", [*LAYOUTS, "aaaabbbb"])
def test_all_reduce_sends_each_hosts_part_once_each_way(hosts: str, dtype: type, wide: int) -> None:
    """A flat ring sends 2 (ranks - 1) / ranks of the array's bytes over each edge, so out of each host, or more.

    Partial results of half types are wide, so they are twice as long on their way to where they are reduced.
    """
    nbytes = COUNT * np.dtype(dtype).itemsize
    number = len(set(hosts))
    with world(len(hosts), "tcp", hosts=hosts) as ranks:
        left = sent_between_hosts(ranks, make(OpType.ALL_REDUCE, dtype))
    for host in set(hosts):
        assert left[host] == pytest.approx((1 + wide) * (number - 1) / number * nbytes, rel=0.02)
        ring = 2 * (len(hosts) - 1) / len(hosts) * nbytes
        if wide == 1:
            assert left[host] < ring


@pytest.mark.parametrize("hosts", LAYOUTS)
def test_the_roots_host_sends_a_broadcast_once(hosts: str) -> None:
    with world(len(hosts), "tcp", hosts=hosts) as ranks:
        left = sent_between_hosts(ranks, make(OpType.BROADCAST, np.float32))
    number = len(set(hosts))
    assert left["a"] == pytest.approx(COUNT * 4, rel=0.01)
    assert left["b"] == pytest.approx(COUNT * 4 * (number - 2) / (number - 1), abs=COUNT * 0.04)


# Which algorithm


def test_short_arrays_go_by_the_leaders_and_different_bytes_for_every_rank_over_the_link(quartet: World) -> None:
    backend = quartet.communicators[0].queue.backend
    assert isinstance(backend, HierarchicalCpuBackend)
    float32 = np.dtype(np.float32)
    assert backend.algorithm(Call(OpType.ALL_REDUCE, float32, 100, ReduceOp.SUM)) is leaders.all_reduce
    assert backend.algorithm(Call(OpType.ALL_REDUCE, float32, 100_000, ReduceOp.SUM)) is hosts.all_reduce
    assert backend.algorithm(Call(OpType.EMPTY, float32, 100)) is registered.over_link
    found = backend.algorithm(Call(OpType.GATHER, float32, 100_000, None, 0))
    assert (found.__module__.rpartition(".")[2], found.__name__) == ("gather", "direct_link")


def test_subgroups_have_a_layout_of_their_own(quartet: World) -> None:
    def call(members: LocalCommunicator) -> list[str]:
        here = quartet.group(members.rank, 7 + members.rank % 2, "host", [members.rank % 2, members.rank % 2 + 2])
        low = members.rank // 2 * 2
        across = quartet.group(members.rank, 20 + low, "across", [low, low + 1])
        three = quartet.group(members.rank, 11, "three", [2, 1, 0]) if members.rank < 3 else None
        made = [here, across] if three is None else [here, across, three]
        for group in made:
            array = np.full(50_000, 1.0)
            group.all_reduce(array, ReduceOp.SUM, NOW)
            assert (array == group.size).all()
        media = [group.medium for group in made]
        for group in made:
            group.close()
        return media

    assert quartet.run(call) == [["shm", "tcp", "shm+tcp"]] * 3 + [["shm", "tcp"]]


# Failures


def long(members: LocalCommunicator) -> None:
    """Make a call that goes over the hosts."""
    members.all_reduce(np.full(200_000, members.rank + 1.0), ReduceOp.SUM, NOW)


def test_an_error_half_way_is_told_to_the_ranks_of_all_hosts(quartet: World) -> None:
    def attempt(members: LocalCommunicator) -> None:
        steps = 0
        if members.rank == 2:
            local = members.queue.backend._topology.local  # type: ignore[attr-defined]
            step = local.step

            def fail() -> None:
                nonlocal steps
                steps += 1
                if steps == 3:
                    raise OSError("cable")
                step()

            local.step = fail
            with pytest.raises(OSError, match="cable"):
                long(members)
            return
        with pytest.raises(
            GroupAbortedError, match=r"rank 2 \(here, pid \d+\) gave up during all_reduce #1: OSErr"
        ) as told:
            long(members)
        assert told.value.ranks == (2,)

    quartet.run(attempt)
