"""Short calls that the compiled core carries out, among ranks of which some do without it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from support.processes import Me, Ranks, wait_until

import rankmesh as dist
from rankmesh import ReduceOp
from rankmesh_agent import native

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(native.core is None, reason=f"the compiled core does not run: {native.reason}"),
]


def run(ranks: Ranks, body: Callable[..., None], native: str, size: int = 2) -> list[Any]:
    """Run a body at ranks, of which every one may use the core or not: 1 or 0 in ``native``, in turn."""

    def variables(rank: int) -> dict[str, str]:
        return {"RANKMESH_TRANSPORT": "shm", "RANKMESH_NATIVE": native[rank % len(native)]}

    return ranks.run(body, size, env=variables)


def world() -> Any:
    assert dist.group.WORLD is not None
    return dist.group.WORLD._communicator


def by_core() -> dict[str, int]:
    """Return how many calls of the world the core has carried out."""
    queue = world().queue
    counts = {} if queue._native is None else queue._native._counts
    return {name: calls for name, each in counts.items() if (calls := sum(each.totals()[2]))}


def make_each_call(me: Me) -> None:
    me.init()
    calls: dict[str, Callable[..., Any]] = {
        "barrier": dist.barrier,
        "all_reduce": lambda: dist.all_reduce(np.ones(5)),
        "reduce": lambda: dist.reduce(np.ones(5, np.int8), 1, ReduceOp.MAX),
        "broadcast": lambda: dist.broadcast(np.ones(5), 1),
        "all_gather": lambda: dist.all_gather_single(np.ones((me.size, 5)), np.ones(5)),
        "gather": lambda: dist.gather(np.ones(5), [np.ones(5)] * me.size if me.rank == 0 else None),
        "scatter": lambda: dist.scatter(np.ones(5), [np.ones(5)] * me.size if me.rank == 0 else None),
        "reduce_scatter": lambda: dist.reduce_scatter_single(np.ones(5), np.ones((me.size, 5))),
        "all_to_all": lambda: dist.all_to_all_single(np.ones((me.size, 5)), np.ones((me.size, 5))),
    }
    first = world().state.seq
    before = world().op_stats()
    for _ in range(3):
        for call in calls.values():
            call()
    # The first call of a kind makes its plan, and goes through the Python code.
    assert by_core() == dict.fromkeys(calls, 2), by_core()
    after = world().op_stats()
    for name in calls:
        earlier = sum(before[name].buckets) if name in before else 0
        assert sum(after[name].buckets) - earlier == 3
    assert (after["all_reduce"].nbytes, after["all_to_all"].nbytes) == (3 * 40, 3 * 40 * me.size)
    assert world().state.seq == first + 27
    recorded = world().recorder.records(last=27)
    assert [record.seq for record in recorded] == [*range(first + 1, first + 28)]
    assert [record.op for record in recorded] == [*calls] * 3
    assert {record.state for record in recorded} == {"completed"}
    dist.barrier()
    dist.destroy_process_group()


def test_short_calls_are_counted_and_recorded(ranks: Ranks) -> None:
    run(ranks, make_each_call, "1", 3)


def stray(me: Me) -> None:
    me.init()
    array, one = np.ones(4), np.ones(1)
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(array),
        lambda: dist.broadcast(array, 0),
        dist.barrier,
        lambda: dist.all_reduce(one),
    ]
    for call in calls * 2:
        call()
    for number in range(len(calls)):
        mine, others = calls[(number + me.rank) % len(calls)], str(1 - me.rank)
        found = me.attempt(mine)
        assert found["error"] == "CollectiveMismatchError", found
        assert f"rank {others}: " in found["text"]
        array[:] = me.rank
        dist.all_reduce(array)  # no rank is in another turn, or ended the group
        assert (array == 1).all()
    unequal = [np.ones(3 + me.rank + to) for to in range(2)]
    received = [np.zeros(3 + me.rank + owner) for owner in range(2)]
    for _ in range(3):
        dist.all_to_all(received, unequal)
    lengths = [[1, 1], [2, 1]][me.rank]  # equal ones at rank 0 alone
    found_lengths = [np.zeros(length) for length in ([1, 2], [1, 1])[me.rank]]
    for _ in range(3):
        dist.all_to_all(found_lengths, [np.full(length, 7.0) for length in lengths])
        assert all((each == 7).all() for each in found_lengths)
    wrong = me.attempt(dist.all_to_all, [np.zeros(2)] * 2, [np.ones(2 + me.rank)] * 2)
    assert wrong["error"] == "CollectiveMismatchError", wrong
    for _ in range(3):  # equal parts at rank 0 alone, whose arrays overlap
        both, out = np.arange(6.0), np.zeros(7)
        if me.rank == 0:
            dist.all_to_all_single(both[:4], both[2:])
        else:
            dist.all_to_all_single(out, np.arange(7.0), [2, 5], [2, 5])
        assert (both[:4] == [2, 3, 0, 1]).all() if me.rank == 0 else (out == [4, 5, 2, 3, 4, 5, 6]).all()
    wrong = me.attempt(dist.all_to_all_single, np.zeros(4 + 2 * me.rank), np.ones(4 + 2 * me.rank))
    assert wrong["error"] == "CollectiveMismatchError", wrong
    assert all(
        f"sends {[count] * 2} elements to the ranks and expects {[count] * 2}" in wrong["text"] for count in (2, 3)
    )
    assert me.attempt(dist.all_reduce, array, [])["error"] == "TypeError"
    assert me.attempt(dist.broadcast, array, [])["error"] == "TypeError"
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("native", ["1", "10", "01"])
def test_different_calls(ranks: Ranks, native: str) -> None:
    run(ranks, stray, native)


def rename(me: Me) -> None:
    me.init()
    for ranks in ((0, 1), (1, 0)):
        world().set_global_ranks(ranks)
        for _ in range(3):
            array = np.full(4, ranks[me.rank])
            dist.broadcast(array, 0)
            assert not array.any()
    dist.destroy_process_group()


@pytest.mark.parametrize("native", ["1", "0"])
def test_a_root_after_the_ranks_have_got_other_numbers(ranks: Ranks, native: str) -> None:
    run(ranks, rename, native)


def wait_in_vain(me: Me) -> None:
    me.init()
    array = np.ones(4)
    for _ in range(3):
        dist.all_reduce(array)
    if me.rank == 0:
        seq = world().state.seq + 1
        active: list[Any] = []
        assert not world().info().inflight

        def look() -> None:
            # Soon, while the call waits in the core, not yet in the Python code.
            active.extend(wait_until(lambda: world().info().inflight, "the call", 0.4))

        looking = threading.Thread(target=look)
        looking.start()
        found = me.attempt(dist.all_reduce, array, timeout=0.5)
        looking.join()
        assert [(each.op, each.seq) for each in active] == [("all_reduce(float64[4], SUM)", seq)]
        assert found["error"] == "CollectiveTimeoutError", found
        assert f"all_reduce #{seq} " in found["text"]
        assert " waited 0.5 s for rank 1 " in found["text"]
        assert 0.5 <= found["seconds"] < 10
        assert world().op_stats()["all_reduce"].failures == 1
        assert [record.state for record in world().recorder.records(last=1)] == ["failed"]
        me.mark("timed out")
    me.wait_for("timed out")
    # The call that rank 0 gave up has its array; the next one has not.
    errors = [me.attempt(dist.all_reduce, array)["error"] for _ in range(2)]
    assert errors[-1] in ("CollectiveTimeoutError", "GroupAbortedError"), errors


@pytest.mark.parametrize("native", ["1", "10"])
def test_a_rank_that_does_not_come(ranks: Ranks, native: str) -> None:
    run(ranks, wait_in_vain, native)


def interrupt_soon(me: Me) -> None:
    """Ctrl-C while the call waits in the core, not yet in the Python code."""
    me.init()
    for _ in range(3):
        dist.barrier()
    seq = world().state.seq + 1
    if me.rank == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        assert me.attempt(dist.barrier)["error"] == "KeyboardInterrupt"
        assert not world().info().inflight
        (record,) = world().recorder.records(last=1)
        assert (record.seq, record.state) == (seq, "failed")
        assert record.error.startswith("KeyboardInterrupt")
        assert "gave up during barrier" in str(world().failure)
        me.mark("interrupted")
    me.wait_for("interrupted")
    errors = [me.attempt(dist.barrier)["error"] for _ in range(2)]
    assert errors[-1] == "GroupAbortedError", errors


@pytest.mark.parametrize("native", ["1", "10"])
def test_ctrl_c(ranks: Ranks, native: str) -> None:
    run(ranks, interrupt_soon, native)


def destroy_under_a_wait(me: Me) -> None:
    me.init()
    group = dist.new_group([0, 1])
    dist.barrier(group)
    dist.barrier(group)
    found: list[Any] = []
    if me.rank == 0:
        waiting = threading.Thread(target=lambda: found.append(me.attempt(dist.barrier, group)))
        waiting.start()
        time.sleep(0.02)
        second = threading.Thread(target=lambda: found.append(me.attempt(dist.all_reduce, np.ones(2), group=group)))
        second.start()  # behind the one that waits
        time.sleep(0.02)
        dist.destroy_process_group(group)
        waiting.join()
        second.join()
        assert [each["error"] for each in found] == ["GroupAbortedError"] * 2, found
    dist.barrier()
    dist.destroy_process_group()


def test_a_group_that_is_destroyed_under_a_call(ranks: Ranks) -> None:
    run(ranks, destroy_under_a_wait, "1")


EDGES = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 65504.0, 1e30, 1e-30, 1e-45, 3.0, 0.1]


def reduce_edges(me: Me) -> None:
    """All pairs of numbers at the edges, and random ones, under all reductions and dtypes: bit for bit as Python."""
    from rankmesh_agent.collectives.reduction import combine, ignore_fp_errors
    from rankmesh_agent.wire.dtypes import FROM_CODE, family, zero_padding

    me.init()
    context = ignore_fp_errors()
    for dtype in FROM_CODE.values():
        kind = family(dtype)
        if kind == "opaque":
            continue
        ops = [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]
        for op in ops:
            if (kind == "complex" and op.name in ("MIN", "MAX")) or (kind == "bool" and op is ReduceOp.AVG):
                continue
            whole = [operands(dtype, kind, rank) for rank in range(me.size)]
            results = np.empty_like(whole[0])
            context.run(partial(combine, op, [part.copy() for part in whole], results))
            for kept in [np.full(results.shape, True), *clear(kind, [*whole, results])]:
                expected = results[kept]
                for _ in range(2):
                    mine = whole[me.rank][kept]
                    dist.all_reduce(mine, op)
                    assert zero_padding(mine).tobytes() == zero_padding(expected).tobytes(), (dtype, op)
    dist.barrier()
    dist.destroy_process_group()


def clear(kind: str, arrays: list[Any]) -> list[Any]:
    """Return which elements are finite in all arrays, and which of those are not 0: Python reduces the others.

    And one in which infinity comes alone: its float16 is no large number.
    """
    if kind != "float":
        return []
    with np.errstate(all="ignore"):
        numbers = np.array([array.astype(np.float64) for array in arrays])
        finite = np.isfinite(numbers).all(axis=0)
        return [finite, finite & (numbers != 0).all(axis=0), [2 * len(EDGES) + 7]]


def operands(dtype: np.dtype[Any], kind: str, rank: int) -> Any:
    random = np.random.default_rng(rank)
    if kind == "bool":
        return random.integers(0, 2, 50).astype(dtype)
    if kind == "int":
        return np.frombuffer(random.bytes(400), dtype).copy()
    with np.errstate(all="ignore"):
        pairs = np.array([(a, b) for a in EDGES for b in EDGES])[:, rank % 2]
        values = np.concatenate([pairs, random.normal(0, 100, 300)])
        if dtype.itemsize == 2:  # numbers of all sizes, and pairs of similar size
            bits = np.frombuffer(random.bytes(8000), np.uint16)
            near = bits[:2000] if rank % 2 else np.frombuffer(np.random.default_rng(0).bytes(4000), np.uint16) ^ 0x8013
            return np.concatenate([values.astype(dtype), bits.view(dtype), near.view(dtype)])
        if dtype.names:
            halves = values[: values.size // 2 * 2].astype(np.float16)
            return halves.view(dtype).copy()
        return values.astype(dtype)


@pytest.mark.parametrize("size", [2, 3])
def test_reductions_are_those_of_python_bit_for_bit(ranks: Ranks, size: int) -> None:
    run(ranks, reduce_edges, "1", size)
