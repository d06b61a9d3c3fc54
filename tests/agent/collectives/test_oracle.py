"""Every collective over every transport, 1 to 9 ranks as threads, every length and dtype, against NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.threads import TRANSPORTS, World, world

from rankmesh_agent.engine.communicator import Communicator
from rankmesh_agent.wire.dtypes import FROM_CODE
from rankmesh_agent.wire.frames import SMALL
from rankmesh_agent.wire.ops import ReduceOp

SIZES = range(1, 10)
SLOT_BYTES = 1 << 14
LENGTHS = (0, 1, 7, 1000, SLOT_BYTES // 8, SLOT_BYTES // 8 + 1, SMALL // 8 + 1, 50_021)
"""Empty, one, odd, a slot of float64 and one past it, one past what rides along with an arrival, many chunks."""
DTYPES = tuple(FROM_CODE.values())
REAL = tuple(dtype for dtype in DTYPES if dtype.kind != "c")
TIMEOUT = 30.0


@pytest.fixture(scope="module", params=[(t, n) for t in TRANSPORTS for n in SIZES], ids=lambda p: f"{p[0]}-{p[1]}")
def ranks(request: pytest.FixtureRequest) -> Iterator[World]:
    transport, size = request.param
    with world(size, transport, slot_bytes=SLOT_BYTES) as made:
        yield made


def values(rank: int, count: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return what a rank contributes: numbers small enough that a product of nine of them is exact in most dtypes."""
    drawn = np.random.default_rng([rank, count, dtype.num]).integers(0, 3, count)
    if dtype.kind == "c":
        return (drawn + 1j * drawn[::-1]).astype(dtype)
    if dtype.kind == "f":
        return ((drawn - 1) * 1.25).astype(dtype)
    return drawn.astype(dtype)


def expected(op: ReduceOp, parts: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Return the reduction in rank order, the oracle; float16 is accumulated in float32."""
    ufunc = {
        ReduceOp.SUM: np.add,
        ReduceOp.PRODUCT: np.multiply,
        ReduceOp.MIN: np.minimum,
        ReduceOp.MAX: np.maximum,
    }[op]
    dtype = parts[0].dtype
    wide = np.dtype(np.float32) if dtype == np.float16 else dtype
    total = parts[0].astype(wide)
    for part in parts[1:]:
        total = ufunc(total, part.astype(wide), dtype=wide)
    return total.astype(dtype)


def all_reduced(ranks: World, op: ReduceOp, count: int, dtype: np.dtype[Any], async_op: bool) -> list[Any]:
    def call(members: Communicator) -> np.ndarray[Any, Any]:
        array = values(members.rank, count, dtype)
        work = members.all_reduce(array, op, TIMEOUT, async_op, array, None)
        if work is not None:
            work.wait()
        return array

    return ranks.run(call)


@pytest.mark.parametrize("count", LENGTHS)
def test_all_reduce_of_every_length(ranks: World, count: int) -> None:
    for dtype in (np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16)):
        want = expected(ReduceOp.SUM, [values(rank, count, dtype) for rank in range(ranks.size)])
        for got in all_reduced(ranks, ReduceOp.SUM, count, dtype, async_op=False):
            assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("op", ReduceOp)
def test_all_reduce_of_every_dtype(ranks: World, op: ReduceOp) -> None:
    for number, dtype in enumerate(REAL if op in (ReduceOp.MIN, ReduceOp.MAX) else DTYPES):
        for count in (5, 3001):
            want = expected(op, [values(rank, count, dtype) for rank in range(ranks.size)])
            for got in all_reduced(ranks, op, count, dtype, async_op=bool(number % 2)):
                np.testing.assert_array_equal(got, want, err_msg=f"{op.name} {dtype}[{count}]")


def test_all_reduce_is_bitwise_the_same_everywhere_also_where_the_order_matters(ranks: World) -> None:
    def call(members: Communicator) -> bytes:
        digests = b""
        for count in (3, 4097, 40_000):
            array = np.random.default_rng([members.rank, count]).normal(size=count).astype(np.float32) * 1e6
            members.all_reduce(array, ReduceOp.SUM, TIMEOUT, False, array, None)
            digests += array.tobytes()
        return digests

    assert len(set(ranks.run(call))) == 1


def test_all_reduce_of_special_values(ranks: World) -> None:
    def call(members: Communicator) -> np.ndarray[Any, Any]:
        array = np.array([np.inf, np.nan, 3e38, -0.0], np.float32)
        with np.errstate(all="raise"):  # the user's choice must not end a collective half-way
            members.all_reduce(array, ReduceOp.SUM, TIMEOUT, False, array, None)
        return array

    for got in ranks.run(call):
        assert got[0] == np.inf
        assert np.isnan(got[1])
        assert got[2] == (np.inf if ranks.size > 1 else np.float32(3e38))


@pytest.mark.parametrize("count", LENGTHS)
def test_broadcast_from_every_root(ranks: World, count: int) -> None:
    def call(members: Communicator) -> None:
        for root in range(members.size):
            dtype = DTYPES[(root + count) % len(DTYPES)]
            array = values(members.rank, count, dtype)
            work = members.broadcast(array, root, TIMEOUT, bool(root % 2), array, None)
            if work is not None:
                work.wait()
            np.testing.assert_array_equal(array, values(root, count, dtype))

    ranks.run(call)


@pytest.mark.parametrize("count", LENGTHS)
def test_all_gather(ranks: World, count: int) -> None:
    def call(members: Communicator) -> None:
        for number, dtype in enumerate((np.dtype(np.int8), np.dtype(np.float64), np.dtype(np.longdouble))):
            array = values(members.rank, count, dtype)
            outputs = [np.full(count, 1, dtype) for _ in range(members.size)]
            work = members.all_gather(outputs, array, TIMEOUT, bool(number % 2), outputs, None)
            if work is not None:
                work.wait()
            for rank, output in enumerate(outputs):
                np.testing.assert_array_equal(output, values(rank, count, dtype))

    ranks.run(call)


def test_nobody_passes_a_barrier_before_all_have_come(ranks: World) -> None:
    come: list[int] = []

    def call(members: Communicator) -> int:
        passed = 0
        for turn in range(20):
            come.append(members.rank)
            members.barrier(TIMEOUT, False)
            passed += len(come) >= members.size * (turn + 1)
        return passed

    assert ranks.run(call) == [20] * ranks.size


def test_asynchronous_calls_keep_their_order_and_synchronous_ones_queue_behind_them(ranks: World) -> None:
    def call(members: Communicator) -> np.ndarray[Any, Any]:
        array = np.full(2000, 1.0)
        works = [members.all_reduce(array, ReduceOp.SUM, TIMEOUT, True, array, None) for _ in range(5)]
        members.all_reduce(array, ReduceOp.MAX, TIMEOUT, False, array, None)
        assert all(work is not None and work.is_completed() and work.is_success() for work in works)
        return array

    for got in ranks.run(call):
        assert (got == float(ranks.size) ** 5).all()
