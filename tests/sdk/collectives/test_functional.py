"""functional: results of the argument's kind, and arguments that stay as they are."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np
import pytest
from support.processes import Me, on_ranks

import rankmesh as dist
from rankmesh import functional


def read_only(elements: Any) -> Any:
    array = np.array(elements)
    array.flags.writeable = False
    return array


def arrays(library: str, elements: Any) -> list[Any]:
    """Return the elements as the arrays of a library that are to be tried."""
    if library == "numpy":
        return [read_only(elements), np.asfortranarray(elements), elements.astype(">i4")]
    made = importlib.import_module("jax.numpy" if library == "jax" else library)
    return [made.asarray(elements), made.asarray(elements).astype(made.bfloat16)] if library == "jax" else [
        made.tensor(elements), made.tensor(elements, dtype=made.bfloat16, requires_grad=True)
    ]  # fmt: skip


def results(array: Any) -> list[Any]:
    """Return what every function makes of an array with two rows."""
    splits = [2, 0] if dist.get_rank() else [0, 2]  # all rows go to the other rank
    return [
        functional.all_reduce(array),
        functional.all_reduce(array, dist.ReduceOp.MAX, dist.group.WORLD, timeout=60.0),
        functional.broadcast(array, 1),
        functional.all_gather_single(array),
        functional.all_gather_single(array[0, 0, ...]),
        functional.reduce_scatter_single(array),
        functional.all_to_all_single(array),
        functional.all_to_all_single(array, splits, splits),
    ]


def wanted(zero: Any, one: Any, rank: int) -> list[Any]:
    """Return what ``results`` returns on a rank, given the arrays of both."""
    mine = slice(rank, rank + 1)
    return [
        zero + one, np.maximum(zero, one), one, np.concatenate([zero, one]), np.array([zero[0, 0], one[0, 0]]),
        (zero + one)[mine], np.concatenate([zero[mine], one[mine]]), (one, zero)[rank],
    ]  # fmt: skip


def has(library: str) -> Any:
    found = importlib.util.find_spec(library)
    missing = found is None or found.origin is None  # tests/torch is a namespace of that name
    return pytest.param(library, marks=pytest.mark.skipif(missing, reason=f"{library} is not installed"))


@pytest.mark.parametrize("library", ["numpy", has("torch"), has("jax")])
@on_ranks(2)
def test_results_are_new_arrays_of_the_arguments_kind(me: Me, library: str) -> None:
    me.init()
    zero, one = (np.arange(6, dtype=np.int32).reshape(2, 3) * (rank + 2) for rank in range(2))
    for array in arrays(library, (zero, one)[me.rank]):
        for number, (found, correct) in enumerate(zip(results(array), wanted(zero, one, me.rank), strict=True)):
            assert (type(found), found.dtype) == (type(array), array.dtype), number
            as_numpy = np.asarray(found.detach().float() if library == "torch" else found, np.int32)
            np.testing.assert_array_equal(as_numpy, correct, str(number))
    if library == "numpy":
        assert functional.all_reduce(bytes([1, 2 + me.rank])) == b"\2\5"
        assert functional.broadcast(b"ab" if me.rank else b"..", 1) == b"ab"
        assert functional.all_gather_single(memoryview(b"xy")).tobytes() == b"xyxy"
        with pytest.raises(ValueError, match="tensor has 3 rows, which do not divide evenly by the group's 2 ranks"):
            functional.reduce_scatter_single(np.ones(3))
        alone = dist.new_group([0])
        if me.rank:
            with pytest.raises(ValueError, match="not a member of the group"):
                functional.all_reduce(b"a", group=alone)
    if library == "jax":
        jax, callback = importlib.import_module("jax"), importlib.import_module("jax.experimental").io_callback
        array = jax.numpy.ones(3)
        assert jax.jit(lambda x: callback(functional.all_reduce, x, x, ordered=True))(array).tolist() == [2.0] * 3
    dist.destroy_process_group()
