"""Frames that the busiest of many ranks sends in collectives over messages, counted; the sweep has the results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.in_memory import MemoryWorld

from rankmesh_agent.collectives import broadcast
from rankmesh_agent.wire.ops import Call, OpType, ReduceOp

Array = np.ndarray[Any, Any]


FLOAT, SUM, ROOT = np.dtype(np.float32), ReduceOp.SUM, 5


def one(rank: int) -> Array:
    return np.full(1, rank, FLOAT)


def rows(size: int) -> list[Array]:
    return [np.empty(1, FLOAT) for _ in range(size)]


CALLS: list[tuple[Call, Callable[[int, int], tuple[Any, ...]]]] = [
    (Call(OpType.BARRIER), lambda rank, size: ()),
    (Call(OpType.ALL_REDUCE, FLOAT, 1, SUM), lambda rank, size: (one(rank), SUM)),
    (Call(OpType.BROADCAST, FLOAT, 1, None, ROOT), lambda rank, size: (one(rank), ROOT)),
    (Call(OpType.REDUCE, FLOAT, 1, SUM, ROOT), lambda rank, size: (one(rank), SUM, ROOT)),
    (
        Call(OpType.GATHER, FLOAT, 1, None, ROOT),
        lambda rank, size: (rows(size) if rank == ROOT else [], one(rank), ROOT),
    ),
    (Call(OpType.ALL_GATHER, FLOAT, 1), lambda rank, size: (rows(size), one(rank))),
]


@pytest.mark.parametrize(("size", "shares_cores"), [(16, False), (33, True), (64, True)])
def test_the_busiest_rank_sends_few_frames(size: int, shares_cores: bool) -> None:
    ranks, most = MemoryWorld(size, shares_cores=shares_cores), 2 * (size - 1).bit_length() + 2
    for call, arguments in CALLS:
        given = ranks.call(call, lambda rank, arguments=arguments: arguments(rank, size))
        assert ranks.busiest() <= most, call
        if call.kind is OpType.ALL_REDUCE:
            assert {float(array[0]) for array, _ in given} == {size * (size - 1) / 2}


@pytest.mark.parametrize("size", [2, 5, 8, 9])
def test_a_long_array_follows_a_tree_in_chunks_where_ranks_share_cores(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "CHUNK_BYTES", 1000)
    ranks = MemoryWorld(size, shares_cores=True)
    for root in range(size):
        arrays = [np.arange(900, dtype="f4") if rank == root else np.zeros(900, "f4") for rank in range(size)]
        ranks.run(lambda link: broadcast.chunked_tree_link(link, arrays[link.rank], root))  # noqa: B023 - it has ended
        assert all((array == np.arange(900)).all() for array in arrays)
        children = (size - 1).bit_length()
        assert ranks.busiest() <= 4 * children + 2 * (size - 1), "of 4 chunks, and those of the arrival"
