"""The order on streams: nothing is synchronized between what fills an array, a call on it, and what uses it then.

The double carries streams out late, in an order that a seed decides: what is not ordered shows.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from support.gpus import OfEngine, each_engine_once
from support.processes import Me, Ranks

import rankmesh as dist

pytestmark = pytest.mark.processes

each_engine = pytest.mark.parametrize("engine", ["nccl", "staged"])
ROUNDS = 6
TURNS = 8


def on_the_current_stream(me: Me) -> list[Any]:
    """Kernels fill the array, the call, kernels that use the result: on one stream, again and again."""
    import cupy

    found = []
    for number in range(ROUNDS):
        with cupy.cuda.Stream(non_blocking=number % 2 == 0):
            array = cupy.zeros(10_000, np.float32)
            for _ in range(me.rank + 1):
                array += 1
            dist.all_reduce(array)
            after = array * 2
            outputs = [cupy.zeros_like(after) for _ in range(me.size)]
            dist.all_gather(outputs, after)
            total = outputs[0] + outputs[1]
            array.fill(-1)  # what comes later must not be seen by the peers
            found.append(set(total.get().tolist()))
    return [sorted(each) for each in found]


def asynchronously(me: Me) -> list[Any]:
    """Calls on the group's stream, which wait for the current one, which waits for them by Work.wait()."""
    import cupy

    found = []
    for _ in range(ROUNDS):
        with cupy.cuda.Stream(non_blocking=True):
            arrays = [cupy.full(5_000, float(me.rank + lane), np.float64) for lane in range(3)]
            works = [dist.all_reduce(array, async_op=True) for array in arrays]
            gathered = [cupy.zeros_like(arrays[0]) for _ in range(me.size)]
            works.append(dist.all_gather(gathered, arrays[0], async_op=True))
            for work in works:
                assert work.wait() is True
            total = arrays[0] + arrays[1] + arrays[2] + gathered[1]
            found.append(sorted(set(total.get().tolist())))
            assert all(work.is_completed() and work.is_success() and work.exception() is None for work in works)
    return found


def read_before(me: Me, rounds: int) -> None:
    """Read the result without waiting for the Work."""
    import cupy

    me.init(timeout=60)
    early = 0
    for _ in range(rounds):
        with cupy.cuda.Stream(non_blocking=True):
            array = cupy.full(1_000, 1.0)
            work = dist.all_reduce(array, async_op=True)
            early += int((array.get() != me.size).any())
            work.wait()
            assert (array.get() == me.size).all()
    me.report(early=early)
    dist.destroy_process_group()


def works(me: Me) -> dict[str, Any]:
    import cupy

    array = cupy.full(1_000, 1.0)
    told: dict[str, Any] = {}
    me.meet("begin")
    if me.rank == 1:
        me.wait_for("tried")
    work = dist.all_reduce(array, async_op=True) if me.rank == 0 else None
    if work is not None:
        told |= {"soon": me.attempt(work.wait, 0.2), "early": work.is_completed(), "before": work.exception()}
        me.mark("tried")
    else:
        work = dist.all_reduce(array, async_op=True)
    seen = []
    following = work.get_future().then(lambda future: seen.append(future.value()) or "done")
    assert following.wait(60) == "done"
    assert work.wait(60)
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0] is array
    assert seen[0][0] is array
    return told | {"sum": float(array.sum().get())}


def freed(me: Me) -> list[Any]:
    """The caller lets go of its arrays at once: the memory stays until the calls have ended."""
    import cupy

    kept = []
    for number in range(30):
        array = cupy.full(4_096, float(number + me.rank))
        outputs = [cupy.zeros(4_096) for _ in range(me.size)] if number % 3 == 0 else None
        if outputs is not None:
            work = dist.all_gather(outputs, array, async_op=True)
            kept.append((number, work, outputs))
        else:
            dist.all_reduce(array[::2], async_op=True)
        del array
        other = cupy.full(4_096, -7.0)  # takes the memory that is free
        del other
    wrong = []
    for number, work, outputs in kept:
        work.wait()
        wrong += [number for rank, each in enumerate(outputs) if not (each.get() == number + rank).all()]
    return wrong


def two_groups_and_two_threads(me: Me) -> dict[str, Any]:
    import cupy

    groups = [dist.new_group(), dist.new_group()]
    for group in groups:  # connected in one order at all ranks
        dist.all_reduce(cupy.ones(1), group=group)
    found = [[], []]
    errors = []

    def run(number):
        try:
            with cupy.cuda.Stream(non_blocking=True):
                for turn in range(TURNS):
                    array = cupy.full(2_000, float(me.rank + turn * (number + 1)))
                    dist.all_reduce(array, group=groups[number])
                    found[number].append(sorted(set(array.get().tolist())))
        except BaseException as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    return {"found": found, "errors": errors}


def threads_of_asynchronous_calls() -> list[str]:
    """Make some, and return the threads that carry out the group's calls."""
    import cupy

    works = [dist.all_reduce(cupy.ones(10), async_op=True) for _ in range(3)]
    names = [thread.name for thread in threading.enumerate() if thread.name == "rankmesh-world"]
    for work in works:
        work.wait()
    return names


def everything(me: Me, backend: str | None) -> None:
    import cupy

    me.init(timeout=60, backend=backend)
    dist.all_reduce(cupy.ones(1))  # the first one looks which GPUs there are, and waits for all
    me.report(threads=threads_of_asynchronous_calls())
    for part in (on_the_current_stream, asynchronously, works, freed, two_groups_and_two_threads):
        me.report(**{part.__name__: part(me)})
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> OfEngine:
    """What the ranks of an engine reported."""
    return each_engine_once(tmp_path_factory, everything)


SAID: dict[str, Any] = {
    "on_the_current_stream": [[12.0]] * ROUNDS,
    "asynchronously": [[(0 + 1) + (1 + 2) + (2 + 3) + (0 + 1)]] * ROUNDS,
    "freed": [],
    "two_groups_and_two_threads": {
        "found": [[[1.0 + 2 * turn * (number + 1)] for turn in range(TURNS)] for number in range(2)],
        "errors": [],
    },
}
"""What both ranks have to say of a part."""


@each_engine
@pytest.mark.parametrize("part", SAID)
def test_what_uses_a_result_comes_after_the_call(reported: OfEngine, machine: Any, engine: str, part: str) -> None:
    assert [of_rank[part] for of_rank in reported(machine, engine)] == [SAID[part]] * 2


@each_engine
def test_only_nccl_needs_no_thread_for_asynchronous_calls(reported: OfEngine, machine: Any, engine: str) -> None:
    """Over it no rank waits on its host for the others; elsewhere the calls are carried out in a thread."""
    for of_rank in reported(machine, engine):
        assert of_rank["threads"] == ([] if engine == "nccl" else ["rankmesh-world"])


def test_without_waiting_results_are_wrong(ranks: Ranks, machine: Any) -> None:
    """Else the tests of asynchronous calls could not fail."""
    environment = machine.double([0, 1], delay=0.01)
    assert all(rank.reported["early"] > 0 for rank in ranks.run(read_before, 2, env=environment, rounds=40))


@each_engine
def test_a_work_tells_what_becomes_of_the_call(reported: OfEngine, machine: Any, engine: str) -> None:
    first, second = (of_rank["works"] for of_rank in reported(machine, engine))
    assert first["sum"] == second["sum"] == 2000.0
    assert first["soon"]["error"] == "CollectiveTimeoutError"
    assert "it goes on" in first["soon"]["text"]
    assert not first["early"]
    assert first["before"] is None
