"""dist.empty: arrays in memory that the ranks share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from support.hosting import embedded_only
from support.processes import Me, Ranks, on_ranks

import rankmesh as dist


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@on_ranks(3, env={"RANKMESH_TRANSPORT": "{transport}"})
def test_collectives_on_registered_arrays(me: Me) -> None:
    me.init()
    rank, size = dist.get_rank(), dist.get_world_size()
    array = dist.empty((300, 400))
    assert (array.shape, array.dtype, array.flags.c_contiguous) == ((300, 400), np.float32, True)
    array[:] = rank + 1
    dist.all_reduce(array)
    assert (array == size * (size + 1) // 2).all()
    half = array[150:]
    half[:] = rank
    dist.all_reduce(half, dist.ReduceOp.MAX)
    assert (half == size - 1).all()
    assert (array[:150] == size * (size + 1) // 2).all()
    ordinary = np.full((300, 400), rank, np.float32) if rank else array
    ordinary[:] = rank
    dist.all_reduce(ordinary)  # a rank whose array is registered, and others whose are not
    assert (ordinary == size * (size - 1) // 2).all()
    gathered = dist.empty(size * 50_000, np.int32)
    dist.all_gather_into_tensor(gathered, np.full(50_000, rank, np.int32))
    assert (gathered == np.repeat(np.arange(size), 50_000)).all()
    column = array[:, 1]  # not contiguous: staged
    column[:] = 1
    dist.all_reduce(column)
    assert (array[:, 1] == size).all()
    work = dist.all_reduce(array, async_op=True)
    assert work is not None
    work.wait()
    assert dist.empty((), np.float64).shape == ()
    assert dist.empty((0, 3)).shape == (0, 3)
    group = dist.new_group([0, 1])
    if rank < 2:
        pair = dist.empty(40_000, np.float16, group)
        pair[:] = 2
        dist.all_reduce(pair, group=group)
        assert (pair == 4).all()
    dist.destroy_process_group()
    assert array[0, 0] == array[0, 2], "the memory outlives the group"
    array[:] = 0


@embedded_only("its agent makes the calls on arrays of its own")
@on_ranks(3)
def test_a_late_rank_does_not_write_into_arrays_of_a_call_that_has_failed(me: Me) -> None:
    me.init(timeout=120)
    calls: dict[str, Callable[..., Any]] = {"all_reduce": dist.all_reduce, "reduce": partial(dist.reduce, dst=0)}
    for name, call in calls.items():
        group = dist.new_group([0, 1, 2])
        array = dist.empty(2_000_000, group=group)
        array[:] = 5
        call(array, group=group)
        part = array[1000:1_900_000]  # begins and ends inside pages
        part[:] = 1
        with pytest.MonkeyPatch.context() as patch:
            if me.rank == 2:  # is late as one that the kernel has paused, with the addresses of all arrays
                module = sys.modules[f"rankmesh_agent.collectives.{name}"]
                reduce_exposed = module.reduce_exposed

                def late(*arguments: Any, reduce_exposed: Any = reduce_exposed, name: str = name) -> Any:
                    me.wait_for(f"reused {name} 0", f"reused {name} 1")
                    yield from reduce_exposed(*arguments)

                patch.setattr(module, "reduce_exposed", late)
            failed = me.attempt(call, part, group=group, timeout=0.5 if me.rank == 0 else 120)
        assert failed["error"] in ("CollectiveTimeoutError", "GroupAbortedError"), failed
        around = np.concatenate([array[:1000], array[1_900_000:]])
        assert (around == around[0]).all(), "the elements beside the call's are as they were"
        part[:] = 7
        me.mark(f"reused {name} {me.rank}")
        me.wait_for(f"reused {name} 2")
        assert (part == 7).all()
        array[:] = 8
        assert part[0] == part[-1] == 8, "the parts of the array are still one"


def ask_for_different_arrays(me: Me) -> None:
    me.init()
    me.report(**me.attempt(dist.empty, 100 + dist.get_rank()))
    array = dist.empty(5)
    array[:] = 1
    dist.all_reduce(array)
    assert (array == 2).all()


def test_ranks_that_ask_for_different_arrays_are_told_and_go_on(ranks: Ranks) -> None:
    for started in ranks.run(ask_for_different_arrays, 2):
        assert started.reported["error"] == "CollectiveMismatchError"
        assert "rank 0: empty(float32[100]); rank 1: empty(float32[101])" in started.reported["text"]


@pytest.mark.usefixtures("alone")
class TestArguments:
    def test_alone(self) -> None:
        array = dist.empty([2, np.int64(3)], "f8")
        assert array is not None
        assert (array.shape, array.dtype) == ((2, 3), np.float64)

    @pytest.mark.parametrize("shape", [-1, (3, -2)])
    def test_a_negative_shape(self, shape: object) -> None:
        with pytest.raises(ValueError, match="shape must not be negative"):
            dist.empty(shape)  # type: ignore[arg-type]

    @pytest.mark.parametrize("shape", ["3", 2.5, (1, None), None])
    def test_what_is_no_shape(self, shape: object) -> None:
        with pytest.raises(TypeError):
            dist.empty(shape)  # type: ignore[arg-type]

    @pytest.mark.parametrize("dtype", [object, "U3", "M8[s]"])
    def test_a_dtype_that_cannot_be_communicated(self, dtype: object) -> None:
        with pytest.raises(TypeError, match="cannot be communicated"):
            dist.empty(3, dtype)  # type: ignore[arg-type]

    def test_inside_of_a_batch(self) -> None:
        with pytest.raises(RuntimeError, match="outside of the batch"), dist.batch():
            dist.empty(3)
