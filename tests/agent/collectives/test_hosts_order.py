"""The order of reductions over several hosts, which is by host, and their calls among those that stay on the link."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from support.oracle import NARROW, expected
from support.threads import NOW, World, world

from rankmesh_agent.backends.cpu import HierarchicalCpuBackend
from rankmesh_agent.collectives import hosts
from rankmesh_agent.collectives.hosts import layout_of
from rankmesh_agent.collectives.select import algorithm
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.progress.message_link import MessageLink
from rankmesh_agent.wire.ops import Call, OpType, ReduceOp

Array = np.ndarray[Any, Any]

LAYOUTS = ("aabb", "aaab", "abcc", "aaaabbbcc", "abab", "abcabca", "abbba")
"""Two and two, three and one, one and one and two, four and three and two, and ranks that are not in a row."""
SLOT_BYTES = 1 << 13
HIERARCHICAL = {
    OpType.ALL_REDUCE: hosts.all_reduce,
    OpType.REDUCE: hosts.reduce,
    OpType.REDUCE_SCATTER: hosts.reduce_scatter,
    OpType.BROADCAST: hosts.broadcast,
    OpType.ALL_GATHER: hosts.all_gather,
}


@pytest.fixture(scope="module", params=LAYOUTS)
def ranks(request: pytest.FixtureRequest) -> Iterator[World]:
    """A world in which arrays of every length go over the hosts."""

    def choose(self: HierarchicalCpuBackend, call: Call) -> Any:
        return HIERARCHICAL.get(call.kind) or algorithm(call.kind, "hosts", call.nbytes, self._link.size)

    with (
        pytest.MonkeyPatch.context() as patch,
        world(len(request.param), "tcp", slot_bytes=SLOT_BYTES, hosts=request.param) as made,
    ):
        patch.setattr(HierarchicalCpuBackend, "algorithm", choose)
        assert {members.medium for members in made.communicators} == {"shm+tcp"}
        yield made


def by_host(ranks: World, parts: Sequence[Array]) -> Array:
    """Return the sum associated as the hosts do: of each host's ranks, then of the hosts; wide until the end."""
    wide = [part.astype(np.float32) if part.dtype in NARROW else part for part in parts]
    hosts = [expected(ReduceOp.SUM, [wide[rank] for rank in host]) for host in layout_of(ranks.hosts)]
    return expected(ReduceOp.SUM, hosts).astype(parts[0].dtype)


def noise(rank: int, count: int, dtype: np.dtype[Any]) -> Array:
    """Return numbers whose sum depends on the order in which they are added."""
    return (np.random.default_rng([rank, count]).normal(size=count) * 1e3).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("count", [7, 9001])
def test_sums_are_associated_by_host_and_the_same_everywhere(ranks: World, dtype: type, count: int) -> None:
    parts = [noise(rank, count, np.dtype(dtype)) for rank in range(ranks.size)]
    want = by_host(ranks, parts)
    precise = np.sum([part.astype(np.float64) for part in parts], axis=0)
    coarse = np.finfo(dtype).eps * 1e4 * ranks.size

    def call(members: LocalCommunicator) -> None:
        array = parts[members.rank].copy()
        members.all_reduce(array, ReduceOp.SUM, NOW)
        assert array.tobytes() == want.tobytes()
        np.testing.assert_allclose(array.astype(np.float64), precise, atol=coarse)
        for root in range(members.size):
            array = parts[members.rank].copy()
            members.reduce(array, ReduceOp.SUM, root, NOW)
            assert array.tobytes() == (want if members.rank == root else parts[members.rank]).tobytes()
        output = np.empty_like(want)
        members.reduce_scatter(output, [parts[members.rank]] * members.size, ReduceOp.SUM, NOW)
        assert output.tobytes() == want.tobytes()

    ranks.run(call)


def test_a_reduction_to_a_root_is_shared_by_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The root's host receives the others' parts of its share, and their shares: not all arrays of all hosts."""
    came = [0] * 6
    start = MessageLink.start

    def counted(self: MessageLink, sends: Any, receives: Any) -> Any:
        came[self.rank] += sum(len(view) for _, view in receives)
        return start(self, sends, receives)

    monkeypatch.setattr(MessageLink, "start", counted)
    monkeypatch.setattr(HierarchicalCpuBackend, "algorithm", lambda self, call: HIERARCHICAL[call.kind])
    with world(6, "tcp", slot_bytes=SLOT_BYTES, hosts="aabbcc") as made:
        came[:] = [0] * 6  # without how they found their shared memory
        made.run(lambda comm: comm.reduce(np.ones(6_144, np.float32), ReduceOp.SUM, 0, NOW))
    of_hosts = [sum(came[host : host + 2]) for host in (0, 2, 4)]
    assert of_hosts == pytest.approx([32_768, 16_384, 16_384], rel=0.01)  # shards are not quite equal
