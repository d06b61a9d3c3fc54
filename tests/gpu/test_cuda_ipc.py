"""Memory that ranks on one GPU show each other: staged where it cannot be shown, empty, freed and made anew."""

from __future__ import annotations

from typing import Any

import pytest
from support.processes import Me, Ranks

import rankmesh as dist

pytestmark = pytest.mark.processes

ROUNDS = 40


def without_handles() -> None:
    """Have no memory of the users' be shown, as if it came from cudaMallocAsync."""
    from rankmesh_agent.device import runtime

    alone, allocate, handle = set(), runtime.malloc, runtime.memory_handle

    def allocate_alone(nbytes: int) -> int:
        base = allocate(nbytes)
        alone.add(base)
        return base

    def memory_handle(base: int) -> bytes:
        if base not in alone:
            raise RuntimeError("it has no handle")
        return handle(base)

    runtime.malloc, runtime.memory_handle = allocate_alone, memory_handle


def staged(me: Me, rounds: int) -> None:
    import cupy

    without_handles()
    me.init(timeout=60)
    wrong = 0
    for turn in range(rounds):
        first, second = cupy.full(3000, float(me.rank + turn)), cupy.full(2000, float(me.rank - turn))
        work = dist.all_reduce(first, async_op=True)
        dist.all_reduce(second)
        work.wait()
        wrong += int((first.get() != 1 + 2 * turn).any()) + int((second.get() != 1 - 2 * turn).any())
    me.report(wrong=wrong, backend=dist.get_backend_config())
    if me.rank == 0:
        me.report(astray=me.attempt(dist.all_reduce, cupy.ones(3)))
    else:
        me.report(astray=me.attempt(dist.broadcast, cupy.ones(3), 0))
    inputs = [cupy.full(2 * (peer != me.rank), me.rank) for peer in range(me.size)]
    outputs = [cupy.zeros(2 * (peer != me.rank), int) for peer in range(me.size)]
    dist.all_to_all(outputs, inputs)
    me.report(swapped=[each.get().tolist() for each in outputs])
    dist.destroy_process_group()


def test_calls_on_two_streams_take_turns_with_memory_of_ours(ranks: Ranks, machine: Any) -> None:
    environment = machine.shared(2) if machine.gpus else machine.shared(2, delay=0.005)
    for number, rank in enumerate(ranks.run(staged, 2, env=environment, rounds=ROUNDS)):
        assert rank.reported["wrong"] == 0
        assert "cuda-ipc" in rank.reported["backend"]
        assert rank.reported["astray"]["error"] == "CollectiveMismatchError"
        assert rank.reported["swapped"] == [[1 - number] * 2 * (peer != number) for peer in range(2)]


def empty(me: Me) -> None:
    """Parts without elements have no memory to show."""
    import cupy

    me.init(timeout=60)
    dist.all_reduce(cupy.ones(1))
    inputs = [cupy.full(3 * (peer > me.rank), 10 * me.rank + peer) for peer in range(me.size)]
    outputs = [cupy.zeros(3 * (peer < me.rank), int) for peer in range(me.size)]
    dist.all_to_all(outputs, inputs)
    nothing = cupy.zeros(0)
    dist.all_reduce(nothing)
    dist.all_gather([cupy.zeros(0) for _ in range(me.size)], nothing)
    dist.broadcast(nothing, 1)
    me.report(found=[each.get().tolist() for each in outputs])
    me.report(staged=dist.group.WORLD._gpu._collectives.gpu_backend._staging[1])
    dist.destroy_process_group()


def test_parts_without_elements_do_not_send_the_others_through_memory_of_ours(ranks: Ranks, machine: Any) -> None:
    for number, rank in enumerate(ranks.run(empty, 3, env=machine.shared(3))):
        assert rank.reported["found"] == [[10 * peer + number] * 3 * (peer < number) for peer in range(3)]
        assert rank.reported["staged"] == 0


def again(me: Me, rounds: int) -> None:
    """Free an array, and have the next one where it was: the peer has it mapped still."""
    import cupy

    from rankmesh_agent.device import runtime

    pool, refused, open_memory = cupy.get_default_memory_pool(), [], runtime.open_memory

    def opened(handle: bytes) -> int:
        try:
            return open_memory(handle)
        except RuntimeError as error:
            refused.append(str(error))
            raise

    runtime.open_memory = opened
    me.init(timeout=60)
    wrong = 0
    for turn in range(rounds):
        array = cupy.full(1 << 19, float(me.rank + turn))
        dist.all_reduce(array)
        wrong += int((array.get() != 1 + 2 * turn).any())
        del array
        dist.barrier()
        pool.free_all_blocks()
        dist.barrier()
    me.report(wrong=wrong, refused=refused)
    dist.destroy_process_group()


def test_memory_that_was_freed_makes_room_for_what_comes_in_its_place(ranks: Ranks, machine: Any) -> None:
    started = ranks.run(again, 2, env=machine.shared(2), rounds=6)
    assert [rank.reported["wrong"] for rank in started] == [0, 0]
    if not machine.gpus:  # where memory comes to lie on a GPU is the driver's affair
        assert any("AlreadyMapped" in text for rank in started for text in rank.reported["refused"]), started[
            0
        ].reported
