"""Every collective over every transport, 1 to 9 ranks as threads, every length, dtype and operation, against NumPy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.oracle import OPS, average, expected, ops_of, values
from support.threads import LATER, NOW, TRANSPORTS, World, world

from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.group.work import Work
from rankmesh_agent.wire.dtypes import FROM_CODE, display
from rankmesh_agent.wire.frames import SMALL
from rankmesh_agent.wire.ops import ReduceOp

SIZES = range(1, 9)
SLOT_BYTES = 1 << 14
LENGTHS = (0, 1, 7, 1000, SLOT_BYTES // 8, SLOT_BYTES // 8 + 1, SMALL // 8 + 1, 50_021)
"""Empty, one, odd, a slot of float64 and one past it, one past what rides along with an arrival, many chunks."""
DTYPES = tuple(FROM_CODE.values())
SMALL_WORLD = 4
"""Ranks up to which all is gone through: what dtype, operation and root have to do with their number shows there.
Larger worlds take every so many of the same, and together all of them."""
FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)


@pytest.fixture(scope="module", params=[(t, n) for t in TRANSPORTS for n in SIZES], ids=lambda p: f"{p[0]}-{p[1]}")
def ranks(request: pytest.FixtureRequest) -> Iterator[World]:
    transport, size = request.param
    with world(size, transport, slot_bytes=SLOT_BYTES) as made:
        yield made


def done(work: Work | None) -> None:
    """Wait for an asynchronous call; a synchronous one has returned None."""
    if work is not None:
        work.wait()


def same(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any], what: str = "") -> None:
    """Fail unless two arrays are equal, bit for bit."""
    assert got.dtype == want.dtype, what
    if got.dtype.char in "gG":  # x87 numbers have padding, whose bits mean nothing
        np.testing.assert_array_equal(got, want, err_msg=what)
    elif got.tobytes() != want.tobytes():
        np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8), err_msg=what)


def everyone(ranks: World, count: int, dtype: np.dtype[Any], op: ReduceOp = ReduceOp.SUM) -> np.ndarray[Any, Any]:
    """Return what a reduction of all ranks' values must be."""
    return _everyone(ranks.size, count, dtype, op)


@functools.cache
def _everyone(size: int, count: int, dtype: np.dtype[Any], op: ReduceOp) -> np.ndarray[Any, Any]:
    """Work it out once for all transports."""
    reduced = expected(op, [values(rank, count, dtype) for rank in range(size)])
    reduced.flags.writeable = False
    return reduced


def roots(ranks: World, count: int) -> range:
    """Return every root, in larger worlds every other: the rest with the next length."""
    return range(ranks.size) if ranks.size <= SMALL_WORLD else range(LENGTHS.index(count) % 2, ranks.size, 2)


def modes(number: int) -> Any:
    """Return now and later in turn."""
    return LATER if number % 2 else NOW


# all_reduce and reduce


@pytest.mark.parametrize("count", LENGTHS)
def test_all_reduce_of_every_length(ranks: World, count: int) -> None:
    def call(members: LocalCommunicator) -> None:
        for number, dtype in enumerate((FLOAT32, FLOAT64, np.dtype(np.float16))):
            array = values(members.rank, count, dtype)
            done(members.all_reduce(array, ReduceOp.SUM, modes(number)))
            same(array, want[dtype])

    want = {dtype: everyone(ranks, count, dtype) for dtype in (FLOAT32, FLOAT64, np.dtype(np.float16))}
    ranks.run(call)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_reductions_of_every_dtype(ranks: World, op: ReduceOp) -> None:
    cells = [(dtype, count) for dtype in DTYPES if op in ops_of(dtype) for count in (5, 3001)]
    if ranks.size > SMALL_WORLD:
        cells = cells[ranks.size % 3 :: 3]
    want = {cell: everyone(ranks, cell[1], cell[0], op) for cell in cells}

    def call(members: LocalCommunicator) -> None:
        for number, (dtype, count) in enumerate(cells):
            what = f"{op.name} {display(dtype)}[{count}]"
            array = values(members.rank, count, dtype)
            done(members.all_reduce(array, op, modes(number)))
            same(array, want[dtype, count], f"all_reduce {what}")
            root = number % members.size
            array = values(members.rank, count, dtype)
            done(members.reduce(array, op, root, modes(number + 1)))
            kept = values(members.rank, count, dtype)
            same(array, want[dtype, count] if members.rank == root else kept, f"reduce {what}")

    ranks.run(call)


@pytest.mark.parametrize("count", LENGTHS)
def test_reduce_to_every_root_leaves_the_others_as_they_are(ranks: World, count: int) -> None:
    want = everyone(ranks, count, FLOAT32)

    def call(members: LocalCommunicator) -> None:
        for root in roots(ranks, count):
            array = values(members.rank, count, FLOAT32)
            done(members.reduce(array, ReduceOp.SUM, root, modes(root + root // 2)))
            same(array, want if members.rank == root else values(members.rank, count, FLOAT32))

    ranks.run(call)


def test_reductions_are_bitwise_the_same_everywhere_also_where_the_order_matters(ranks: World) -> None:
    def call(members: LocalCommunicator) -> bytes:
        digests = b""
        for count in (3, 4097, 40_000):
            array = np.random.default_rng([members.rank, count]).normal(size=count).astype(np.float32) * 1e6
            members.all_reduce(array, ReduceOp.SUM, NOW)
            digests += array.tobytes()
        return digests

    assert len(set(ranks.run(call))) == 1


def test_all_reduce_of_special_values(ranks: World) -> None:
    def call(members: LocalCommunicator) -> np.ndarray[Any, Any]:
        array = np.array([np.inf, np.nan, 3e38, -0.0], np.float32)
        with np.errstate(all="raise"):  # the user's choice must not end a collective half-way
            members.all_reduce(array, ReduceOp.SUM, NOW)
        return array

    for got in ranks.run(call):
        assert got[0] == np.inf
        assert np.isnan(got[1])
        assert got[2] == (np.inf if ranks.size > 1 else np.float32(3e38))


def test_the_average_of_integers_does_not_overflow_on_its_way(ranks: World) -> None:
    def call(members: LocalCommunicator) -> None:
        for dtype in (np.int8, np.uint8, np.int16, np.int32, np.uint32):
            limits = np.iinfo(dtype)
            array = np.array([limits.max, limits.min, limits.min + members.rank % 2], dtype)
            want = average([np.array([limits.max, limits.min, limits.min + r % 2], dtype) for r in range(members.size)])
            members.all_reduce(array, ReduceOp.AVG, NOW)
            same(array, want)

    ranks.run(call)


# Copies


@pytest.mark.parametrize("count", LENGTHS)
def test_broadcast_from_every_root(ranks: World, count: int) -> None:
    def call(members: LocalCommunicator) -> None:
        for root in roots(ranks, count):
            dtype = DTYPES[(root + count) % len(DTYPES)]
            array = values(members.rank, count, dtype)
            done(members.broadcast(array, root, modes(root + root // 2)))
            same(array, values(root, count, dtype))

    ranks.run(call)


@pytest.mark.parametrize("count", LENGTHS)
def test_all_gather(ranks: World, count: int) -> None:
    def call(members: LocalCommunicator) -> None:
        for number, dtype in enumerate((np.dtype(np.int8), FLOAT64, np.dtype(np.longdouble))):
            outputs = [blank(count, dtype) for _ in range(members.size)]
            done(members.all_gather(outputs, values(members.rank, count, dtype), modes(number)))
            for rank, output in enumerate(outputs):
                same(output, values(rank, count, dtype))

    ranks.run(call)


UNEVEN: dict[str, Callable[[int], int]] = {
    "short": lambda rank: rank * 3 % 7,
    "one long": lambda rank: 30_011 if rank == 1 else 5,
    "long": lambda rank: 9_000 + rank,
    "first empty": lambda rank: 0 if rank == 0 else 2_048 * rank,
}


@pytest.mark.parametrize("length", UNEVEN.values(), ids=UNEVEN)
def test_all_gather_of_different_lengths(ranks: World, length: Callable[[int], int]) -> None:
    def call(members: LocalCommunicator) -> None:
        for number, dtype in enumerate((np.dtype(np.int16), FLOAT64)):
            outputs = [blank(length(rank), dtype) for rank in range(members.size)]
            done(members.all_gather(outputs, values(members.rank, length(members.rank), dtype), modes(number)))
            for rank, output in enumerate(outputs):
                same(output, values(rank, length(rank), dtype))

    ranks.run(call)


@pytest.mark.parametrize("count", LENGTHS)
def test_gather_to_every_root(ranks: World, count: int) -> None:
    def call(members: LocalCommunicator) -> None:
        for root in roots(ranks, count):
            dtype = DTYPES[(root + count) % len(DTYPES)]
            outputs = [blank(count, dtype) for _ in range(members.size)] if members.rank == root else []
            done(members.gather(outputs, values(members.rank, count, dtype), root, modes(root + root // 2)))
            for rank, output in enumerate(outputs):
                same(output, values(rank, count, dtype))

    ranks.run(call)


@pytest.mark.parametrize("count", LENGTHS)
def test_scatter_from_every_root(ranks: World, count: int) -> None:
    def call(members: LocalCommunicator) -> None:
        for root in roots(ranks, count):
            dtype = DTYPES[(root + count) % len(DTYPES)]
            inputs = [values(rank, count, dtype) for rank in range(members.size)] if members.rank == root else []
            output = blank(count, dtype)
            done(members.scatter(output, inputs, root, modes(root + root // 2)))
            same(output, values(members.rank, count, dtype))

    ranks.run(call)


# reduce_scatter


def block(rank: int, owner: int, count: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return what ``rank`` contributes for ``owner``."""
    return values(rank * 16 + owner, count, dtype)


@pytest.mark.parametrize("count", LENGTHS)
def test_reduce_scatter(ranks: World, count: int) -> None:
    def call(members: LocalCommunicator) -> None:
        for number, (dtype, op) in enumerate(
            ((FLOAT32, ReduceOp.SUM), (np.dtype(np.int64), ReduceOp.MAX), (np.dtype(np.float16), ReduceOp.AVG))
        ):
            inputs = [block(members.rank, owner, count, dtype) for owner in range(members.size)]
            output = blank(count, dtype)
            done(members.reduce_scatter(output, inputs, op, modes(number)))
            same(output, expected(op, [block(rank, members.rank, count, dtype) for rank in range(members.size)]))
            same(inputs[-1], block(members.rank, members.size - 1, count, dtype), "the inputs stay as they are")

    ranks.run(call)


@pytest.mark.parametrize("length", UNEVEN.values(), ids=UNEVEN)
def test_reduce_scatter_of_different_lengths(ranks: World, length: Callable[[int], int]) -> None:
    def call(members: LocalCommunicator) -> None:
        inputs = [block(members.rank, owner, length(owner), FLOAT64) for owner in range(members.size)]
        output = blank(length(members.rank), FLOAT64)
        done(members.reduce_scatter(output, inputs, ReduceOp.SUM, NOW))
        want = [block(rank, members.rank, length(members.rank), FLOAT64) for rank in range(members.size)]
        same(output, expected(ReduceOp.SUM, want))

    ranks.run(call)


@pytest.mark.parametrize("count", [1, 1000, 20_000])
def test_reduce_scatter_into_its_own_input(ranks: World, count: int) -> None:
    def call(members: LocalCommunicator) -> None:
        inputs = [block(members.rank, owner, count, FLOAT32) for owner in range(members.size)]
        output = inputs[members.rank]
        members.reduce_scatter(output, inputs, ReduceOp.SUM, NOW)
        want = [block(rank, members.rank, count, FLOAT32) for rank in range(members.size)]
        same(output, expected(ReduceOp.SUM, want))

    ranks.run(call)


# all_to_all

PAIRS: dict[str, Callable[[int, int], int]] = {
    "empty": lambda sender, receiver: 0,
    "one": lambda sender, receiver: 1,
    "even": lambda sender, receiver: 1000,
    "even and long": lambda sender, receiver: 20_000,
    "all different": lambda sender, receiver: sender * 400 + receiver * 37,
    "one pair only": lambda sender, receiver: 25_000 if (sender, receiver) == (1, 0) else 0,
    "about what is sent along": lambda sender, receiver: 1024 + (sender + receiver) % 3 - 1,
}


@pytest.mark.parametrize("length", PAIRS.values(), ids=PAIRS)
def test_all_to_all(ranks: World, length: Callable[[int, int], int]) -> None:
    def call(members: LocalCommunicator) -> None:
        me = members.rank
        for number, dtype in enumerate((FLOAT64, np.dtype(np.int8), np.dtype(np.clongdouble))):
            inputs = [block(me, to, length(me, to), dtype) for to in range(members.size)]
            outputs = [blank(length(sender, me), dtype) for sender in range(members.size)]
            done(members.all_to_all(outputs, inputs, modes(number)))
            for sender, output in enumerate(outputs):
                same(output, block(sender, me, length(sender, me), dtype))

    ranks.run(call)


def test_copies_of_every_dtype_move_the_bits(ranks: World) -> None:
    def call(members: LocalCommunicator) -> None:
        me, size = members.rank, members.size
        for number, dtype in enumerate(DTYPES):
            outputs = [blank(9, dtype) for _ in range(size)]
            done(members.all_gather(outputs, noise(me, dtype), modes(number)))
            for rank, output in enumerate(outputs):
                assert output.tobytes() == noise(rank, dtype).tobytes()
            outputs = [blank(9, dtype) for _ in range(size)]
            done(members.all_to_all(outputs, [noise(me * 16 + to, dtype) for to in range(size)], modes(number)))
            for rank, output in enumerate(outputs):
                assert output.tobytes() == noise(rank * 16 + me, dtype).tobytes()

    ranks.run(call)


# Order


def test_nobody_passes_a_barrier_before_all_have_come(ranks: World) -> None:
    come: list[int] = []

    def call(members: LocalCommunicator) -> int:
        passed = 0
        for turn in range(20):
            come.append(members.rank)
            members.barrier(NOW)
            passed += len(come) >= members.size * (turn + 1)
        return passed

    assert ranks.run(call) == [20] * ranks.size


def test_asynchronous_calls_keep_their_order_and_synchronous_ones_queue_behind_them(ranks: World) -> None:
    def call(members: LocalCommunicator) -> np.ndarray[Any, Any]:
        array = np.full(2000, 1.0)
        works = [members.all_reduce(array, ReduceOp.SUM, LATER) for _ in range(5)]
        members.all_reduce(array, ReduceOp.MAX, NOW)
        assert all(work is not None and work.is_completed() and work.is_success() for work in works)
        return array

    for got in ranks.run(call):
        assert (got == float(ranks.size) ** 5).all()


def blank(count: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return an array to be filled, of other bits than will come."""
    return np.full(count * dtype.itemsize, 0xA5, np.uint8).view(dtype)


def noise(seed: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return nine elements of random bits, NaNs and all."""
    return np.random.default_rng(seed).integers(0, 256, 9 * dtype.itemsize, np.uint8).view(dtype)
