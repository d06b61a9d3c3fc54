"""The order in which each way to all_reduce over messages reduces, and the bytes that it sends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from support.oracle import expected
from support.threads import LATER, NOW, World, world

from rankmesh_agent.backends.cpu import CpuBackend
from rankmesh_agent.collectives import all_reduce
from rankmesh_agent.collectives.link import shards
from rankmesh_agent.collectives.reduction import partial_dtype
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.progress.message_link import MessageLink
from rankmesh_agent.wire.frames import SMALL
from rankmesh_agent.wire.ops import ReduceOp

Array = np.ndarray[Any, Any]
Fold = Callable[[ReduceOp, Sequence[Array]], Array]

SIZES = (2, 7, 8)
LENGTHS = (0, 1, 7, 1000, SMALL // 8, 300_001)
"""Empty, fewer than ranks, odd; the most that rides along as float64; several pieces."""


PLAIN = {ReduceOp.AVG: ReduceOp.SUM}
"""What is done with partial results where that is not the operation."""


def in_rank_order(op: ReduceOp, parts: Sequence[Array]) -> Array:
    """Return what is reported of most algorithms: one after the other."""
    return expected(op, list(parts))


def round_the_ring(op: ReduceOp, parts: Sequence[Array]) -> Array:
    """Return a reduction in which share k begins at rank k, and each rank's part is the right operand but rank 0's."""
    size, dtype = len(parts), parts[0].dtype
    parts = [part.astype(partial_dtype(op, dtype, size)) for part in parts]
    totals = []
    for first, share in enumerate(shards(parts[0].size, size)):
        total = parts[first][share]
        for rank in range(first + 1, first + size):
            part = parts[rank % size][share]
            total = expected(PLAIN.get(op, op), [part, total] if rank == size else [total, part])
        totals.append(total / size if op is ReduceOp.AVG else total)
    return np.concatenate(totals).astype(dtype)


def as_a_tree(op: ReduceOp, parts: Sequence[Array]) -> Array:
    """Return a reduction of neighbours, of pairs of those, and so on, of a number of parts that is a power of two."""
    nodes = list(parts)
    while len(nodes) > 1:
        nodes = [expected(PLAIN.get(op, op), nodes[place : place + 2]) for place in range(0, len(nodes), 2)]
    return nodes[0] / len(parts) if op is ReduceOp.AVG else nodes[0]


def in_pairs_first(op: ReduceOp, parts: Sequence[Array]) -> Array:
    """Return a reduction in which the first ranks make pairs, so that a power of two is left for a tree."""
    dtype = parts[0].dtype
    wide = partial_dtype(op, dtype, len(parts))
    power = 1 << (len(parts).bit_length() - 1)
    pairs = len(parts) - power
    nodes = [part.astype(wide) for part in parts]
    plain = PLAIN.get(op, op)
    nodes = [expected(plain, nodes[place : place + 2]) for place in range(0, 2 * pairs, 2)] + nodes[2 * pairs :]
    total = as_a_tree(plain, nodes)
    return (total / len(parts) if op is ReduceOp.AVG else total).astype(dtype)


ORDERS: dict[str, tuple[Fold, float]] = {
    "small_link": (in_rank_order, SMALL),
    "star_link": (in_rank_order, SMALL),
    "doubling_link": (in_pairs_first, np.inf),
    "direct_link": (in_rank_order, np.inf),
    "ring_link": (round_the_ring, np.inf),
    "halving_link": (in_pairs_first, np.inf),
}
"""Each algorithm's order, and how many bytes it can take."""


@pytest.fixture(
    scope="module", params=[(way, size) for way in ORDERS for size in SIZES], ids=lambda p: f"{p[0]}-{p[1]}"
)
def case(request: pytest.FixtureRequest) -> Iterator[tuple[str, World]]:
    """A way to all_reduce, and ranks that take it whatever they call."""
    way, size = request.param
    found = getattr(all_reduce, way)
    with pytest.MonkeyPatch.context() as patch, world(size, "tcp") as made:
        patch.setattr(CpuBackend, "algorithm", lambda self, call: found)
        yield way, made


@pytest.fixture
def way(case: tuple[str, World]) -> str:
    return case[0]


@pytest.fixture
def ranks(case: tuple[str, World]) -> World:
    return case[1]


@functools.cache
def drawn(rank: int, count: int) -> Array:
    """Return numbers whose sum depends on the order in which they are added."""
    return np.random.default_rng([rank, count]).normal(size=count)


def test_of_every_length_in_its_order(ranks: World, way: str) -> None:
    cells = [
        (count, dtype, op)
        for count in LENGTHS
        for dtype, op in (("f4", ReduceOp.SUM), ("f8", ReduceOp.AVG), ("f2", ReduceOp.SUM), ("c8", ReduceOp.PRODUCT))
        if count * np.dtype(dtype).itemsize <= ORDERS[way][1]
    ]

    def call(members: LocalCommunicator) -> list[Array]:
        results = []
        for number, (count, dtype, op) in enumerate(cells):
            array = drawn(members.rank, count).astype(dtype)
            work = members.all_reduce(array, op, LATER if number % 2 else NOW)
            if work is not None:
                work.wait()
            results.append(array)
        return results

    everyone = ranks.run(call)
    for number, (count, dtype, op) in enumerate(cells):
        got = [results[number] for results in everyone]
        assert len({array.tobytes() for array in got}) == 1, (count, dtype, op)
        want = ORDERS[way][0](op, [drawn(rank, count).astype(dtype) for rank in range(ranks.size)])
        np.testing.assert_array_equal(got[0], want, err_msg=f"{count} {dtype} {op}")


def test_nobody_sends_more_bytes_than_it_says(ranks: World, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 8 * 9 * 7 * 5 * (400 if ORDERS[way][1] > SMALL else 1)
    sent: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(ranks.size)}
    pieces: set[int] = set()
    start = MessageLink.start

    def counted(self: MessageLink, sends: Any, receives: Any, arrival: Any = b"") -> Any:
        pieces.add(self.chunk_bytes)
        sent[self.rank] += [(to, len(view)) for to, view in sends if len(view)]
        return start(self, sends, receives, arrival)

    monkeypatch.setattr(MessageLink, "start", counted)
    ranks.run(lambda members: members.all_reduce(np.zeros(count, "f4"), ReduceOp.SUM, NOW))
    for rank, messages in sent.items():
        nbytes = sum(length for _, length in messages)
        rides_along = way in ("small_link", "star_link")
        if way == "doubling_link":
            steps = ranks.size.bit_length() - 1
            assert nbytes <= 4 * count * (steps + 1)
            continue
        if way == "halving_link" and ranks.size & (ranks.size - 1):
            assert nbytes <= 4 * count * 3
            continue
        assert nbytes == (0 if rides_along else 8 * count * (ranks.size - 1) // ranks.size)
        if way == "ring_link":
            assert {to for to, _ in messages} == {(rank + 1) % ranks.size}
        if way == "halving_link":
            steps = ranks.size.bit_length() - 1
            pieces_swapped = sum(
                -(-nbytes // max(pieces)) for nbytes in (4 * count >> step + 1 for step in range(steps))
            )
            assert len(messages) == steps + pieces_swapped
