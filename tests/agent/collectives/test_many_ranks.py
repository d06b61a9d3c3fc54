"""Collectives of many ranks over messages: the frames that the busiest rank sends, counted; and the results."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from support.in_memory import MemoryWorld
from support.oracle import expected, values

from rankmesh_agent.collectives import broadcast
from rankmesh_agent.wire.ops import Call, OpType, ReduceOp

Array = np.ndarray[Any, Any]
FLOAT = np.dtype(np.float32)


def calls(size: int, count: int, dtype: np.dtype[Any] = FLOAT, op: ReduceOp = ReduceOp.SUM) -> dict[str, Any]:
    """Return, by name, a call, each rank's arguments, and what their first must be afterwards (None: as before)."""
    root = size // 3
    parts = [values(rank, count, dtype) for rank in range(size)]

    @cache
    def total() -> Array:
        return expected(op, parts)

    @cache
    def split(rank: int, to: int) -> Array:
        return values(rank * size + to, count, dtype)

    def empties() -> list[Array]:
        return [np.empty(count, dtype) for _ in range(size)]

    return {
        "barrier": (Call(OpType.BARRIER), lambda rank: (), lambda rank: None),
        "all_reduce": (
            Call(OpType.ALL_REDUCE, dtype, count, op),
            lambda rank: (parts[rank].copy(), op),
            lambda rank: total(),
        ),
        "broadcast": (
            Call(OpType.BROADCAST, dtype, count, None, root),
            lambda rank: (parts[rank].copy(), root),
            lambda rank: parts[root],
        ),
        "reduce": (
            Call(OpType.REDUCE, dtype, count, op, root),
            lambda rank: (parts[rank].copy(), op, root),
            lambda rank: total() if rank == root else parts[rank],
        ),
        "gather": (
            Call(OpType.GATHER, dtype, count, None, root),
            lambda rank: (empties() if rank == root else [], parts[rank].copy(), root),
            lambda rank: parts if rank == root else [],
        ),
        "scatter": (
            Call(OpType.SCATTER, dtype, count, None, root),
            lambda rank: (np.empty(count, dtype), [part.copy() for part in parts] if rank == root else [], root),
            lambda rank: parts[rank],
        ),
        "all_gather": (
            Call(OpType.ALL_GATHER, dtype, count),
            lambda rank: (empties(), parts[rank].copy()),
            lambda rank: parts,
        ),
        "reduce_scatter": (
            Call(OpType.REDUCE_SCATTER, dtype, count, op),
            lambda rank: (np.empty(count, dtype), [split(rank, to).copy() for to in range(size)], op),
            lambda rank: expected(op, [split(each, rank) for each in range(size)]),
        ),
        "all_to_all": (
            Call(OpType.ALL_TO_ALL, dtype, -1),
            lambda rank: (empties(), [split(rank, to).copy() for to in range(size)]),
            lambda rank: [split(each, rank) for each in range(size)],
        ),
    }


def world_name(value: int | bool) -> str:
    return str(value) if not isinstance(value, bool) else "shared cores" if value else "own cores"


COUNTED = ("barrier", "all_reduce", "broadcast", "reduce", "gather", "all_gather")


@pytest.mark.parametrize(("size", "shares_cores"), [(16, False), (64, True)], ids=world_name)
def test_the_busiest_rank_sends_few_frames(size: int, shares_cores: bool) -> None:
    ranks = MemoryWorld(size, shares_cores=shares_cores)
    sent = {}
    for name, (call, arguments, _) in calls(size, 1).items():
        if name in COUNTED:
            ranks.call(call, arguments)
            sent[name] = ranks.busiest()
    most = 2 * (size - 1).bit_length() + 2
    assert all(frames <= most for frames in sent.values()), (most, sent)


def check(ranks: MemoryWorld, name: str, count: int, dtype: np.dtype[Any], op: ReduceOp) -> None:
    """Fail unless a collective has the right result at every rank."""
    call, arguments, wanted = calls(ranks.size, count, dtype, op)[name]
    for rank, given in enumerate(ranks.call(call, arguments)):
        if wanted(rank) is None:
            continue
        got, want = (list(each) if isinstance(each, list) else [each] for each in (given[0], wanted(rank)))
        assert len(got) == len(want)
        for place, (array, right) in enumerate(zip(got, want, strict=True)):
            assert array.tobytes() == right.tobytes(), (name, count, dtype, op, rank, place, array[:5], right[:5])


SIZES = ((3, False), (6, True), (7, False), (12, True), (33, True))
COUNTS = (0, 7, 20_000)
TYPES = (("f4", ReduceOp.SUM), ("f2", ReduceOp.AVG), ("i1", ReduceOp.AVG), ("i4", ReduceOp.MAX))


@pytest.mark.parametrize(("size", "shares_cores"), SIZES, ids=world_name)
@pytest.mark.parametrize(
    "name",
    ["barrier", "all_reduce", "broadcast", "reduce", "gather", "scatter", "all_gather", "reduce_scatter", "all_to_all"],
)
def test_results(name: str, size: int, shares_cores: bool) -> None:
    ranks = MemoryWorld(size, shares_cores=shares_cores)
    for count in COUNTS if name != "barrier" else (1,):
        for dtype, op in TYPES if size < 16 else TYPES[:2]:  # the types' arithmetic is the same in larger worlds
            if count < 20_000 or dtype in ("f4", "f2"):
                check(ranks, name, count, np.dtype(dtype), op)


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
