"""Where the table goes over to the next algorithm, by the limits in use: right on both sides, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support import oracle
from support.threads import NOW, World, world

from rankmesh_agent.collectives.select import Medium, algorithm
from rankmesh_agent.collectives.thresholds import LIMITS
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.wire.dtypes import display
from rankmesh_agent.wire.ops import OpType, ReduceOp

Array = np.ndarray[Any, Any]
Place = Callable[[Array], Array]

TRANSPORT: dict[Medium, str] = {"segment": "segment", "reads": "segment", "registered": "segment", "link": "tcp"}
SLOT_BYTES = 1 << 20
"""As the settings have it by default, for which the limits were measured."""
PERIOD = 10_007
"""After how many elements the numbers come again: no divisor of a piece or of a share."""
DTYPES = tuple(map(np.dtype, (np.float32, np.float16)))


def switches(medium: Medium, size: int) -> list[tuple[OpType, int]]:
    """Return each collective with the sizes, in bytes, up to which the table takes one algorithm and then another."""
    found = []
    for (name, row), limits in LIMITS.items():
        kind = OpType[name]
        if row != medium or kind is OpType.BARRIER:
            continue
        for limit in sorted({limit for by_size in limits.values() for limit in by_size.values()}):
            before, after = (algorithm(kind, medium, nbytes, size, SLOT_BYTES) for nbytes in (limit, limit + 4))
            if limit > 0 and before is not after:
                found.append((kind, limit))
    return found


WORLDS = [(medium, size) for medium in TRANSPORT for size in (2, 3, 4, 8) if switches(medium, size)]


@pytest.fixture(scope="module", params=WORLDS, ids=lambda p: f"{p[0]}-{p[1]}")
def ranks(request: pytest.FixtureRequest) -> Iterator[tuple[Medium, World]]:
    medium, size = request.param
    with world(size, TRANSPORT[medium], slot_bytes=SLOT_BYTES) as made:
        yield medium, made


def test_both_sides_of_every_switch(ranks: tuple[Medium, World]) -> None:
    medium, made = ranks

    def call(members: LocalCommunicator) -> list[str]:
        place: Place = np.copy
        if medium == "registered":
            most = max(limit for _, limit in switches(medium, made.size)) + 64
            memory = members.empty(np.dtype(np.uint8), (2 * made.size + 1) * most, NOW)
            place = Pool(memory, most).copy
        elif medium == "segment":
            members._queue.backend._segment.windows.can_read = False  # type: ignore[attr-defined]
            members._queue._plans.clear()
        return [
            f"{kind.name} of {limit + more} bytes, {display(dtype)}: {wrong}"
            for kind, limit in switches(medium, made.size)
            for dtype in DTYPES
            for more in (0, 4)
            for wrong in CALLS[kind](members, (limit + more) // dtype.itemsize, dtype, place)
        ]

    assert made.run(call) == [[]] * made.size


# One function a collective: makes it with arrays of ``count`` elements, and says whose result is wrong


def all_reduce(members: LocalCommunicator, count: int, dtype: np.dtype[Any], place: Place) -> list[str]:
    array = place(values(members.rank, count, dtype))
    members.all_reduce(array, ReduceOp.SUM, NOW)
    return compare(members, array, total(members, count, dtype))


def reduce(members: LocalCommunicator, count: int, dtype: np.dtype[Any], place: Place) -> list[str]:
    root = members.size - 1
    array = place(values(members.rank, count, dtype))
    members.reduce(array, ReduceOp.SUM, root, NOW)
    return compare(members, array, total(members, count, dtype)) if members.rank == root else []


def reduce_scatter(members: LocalCommunicator, count: int, dtype: np.dtype[Any], place: Place) -> list[str]:
    array = place(values(members.rank, count, dtype))
    output = place(np.zeros(count, dtype))
    members.reduce_scatter(output, [array] * members.size, ReduceOp.SUM, NOW)
    return compare(members, output, total(members, count, dtype))


def broadcast(members: LocalCommunicator, count: int, dtype: np.dtype[Any], place: Place) -> list[str]:
    root = members.size - 1
    array = place(values(members.rank, count, dtype))
    members.broadcast(array, root, NOW)
    return compare(members, array, values(root, count, dtype))


def all_gather(members: LocalCommunicator, count: int, dtype: np.dtype[Any], place: Place) -> list[str]:
    outputs = [place(np.zeros(count, dtype)) for _ in range(members.size)]
    members.all_gather(outputs, place(values(members.rank, count, dtype)), NOW)
    return compare(members, np.concatenate(outputs), everyones(members, count, dtype))


def gather(members: LocalCommunicator, count: int, dtype: np.dtype[Any], place: Place) -> list[str]:
    root = members.size - 1
    outputs = [place(np.zeros(count, dtype)) for _ in range(members.size)] if members.rank == root else []
    members.gather(outputs, place(values(members.rank, count, dtype)), root, NOW)
    return compare(members, np.concatenate(outputs), everyones(members, count, dtype)) if outputs else []


def scatter(members: LocalCommunicator, count: int, dtype: np.dtype[Any], place: Place) -> list[str]:
    root = members.size - 1
    inputs = [place(values(rank, count, dtype)) for rank in range(members.size)] if members.rank == root else []
    output = place(np.zeros(count, dtype))
    members.scatter(output, inputs, root, NOW)
    return compare(members, output, values(members.rank, count, dtype))


CALLS = {OpType[found.__name__.upper()]: found for found in (
    all_reduce, reduce, reduce_scatter, broadcast, all_gather, gather, scatter,
)}  # fmt: skip


def values(rank: int, count: int, dtype: np.dtype[Any]) -> Array:
    """Return what a rank contributes: the same numbers again and again, which are made sooner."""
    return np.resize(oracle.values(rank, PERIOD, dtype), count)


def total(members: LocalCommunicator, count: int, dtype: np.dtype[Any]) -> Array:
    return np.resize(
        oracle.expected(ReduceOp.SUM, [oracle.values(rank, PERIOD, dtype) for rank in range(members.size)]), count
    )


def everyones(members: LocalCommunicator, count: int, dtype: np.dtype[Any]) -> Array:
    return np.concatenate([values(rank, count, dtype) for rank in range(members.size)])


def compare(members: LocalCommunicator, got: Array, want: Array) -> list[str]:
    return [] if got.tobytes() == want.tobytes() else [f"rank {members.rank} has another result"]


class Pool:
    """Registered memory, of which the same few places are taken in turn."""

    def __init__(self, memory: Array, most: int) -> None:
        self._memory, self._most, self._taken = memory, most, 0

    def copy(self, array: Array) -> Array:
        begin = self._taken * self._most
        self._taken = (self._taken + 1) % (self._memory.size // self._most)
        copied = self._memory[begin : begin + array.nbytes].view(array.dtype)
        copied[:] = array
        return copied
