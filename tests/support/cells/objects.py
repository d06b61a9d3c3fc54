"""Collectives of Python objects."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

from support.sides import Cells

cell = Cells()


def item(rank: int) -> Any:
    """Return an object of a rank: another kind, and another size, for each."""
    return ["foo", {1: 2, "key": [rank, None, True, 2.5, 1 + 2j, b"bytes", (1, {3})]}, ["long" * 5000]][rank % 3]


@cell()
def all_gather_object(dist: Any, rank: int, size: int) -> Any:
    output: list[Any] = [None] * size
    return dist.all_gather_object(output, item(rank)), output


@cell()
def gather_object(dist: Any, rank: int, size: int) -> Any:
    """At every rank, by group rank, and at the default one."""
    results = []
    for root in [{"dst": each} for each in range(size)] + [{"group_dst": size - 1}, {}]:
        here = rank == root.get("dst", root.get("group_dst", 0))
        output: list[Any] | None = [None] * size if here else None
        results.append((dist.gather_object(item(rank), output, **root), output))
    return results


@cell()
def broadcast_object_list(dist: Any, rank: int, size: int) -> Any:
    results = []
    for root in [{"src": each} for each in range(size)] + [{"group_src": size - 1}, {}]:
        here = rank == root.get("src", root.get("group_src", 0))
        objects = [item(0), item(1), item(2)] if here else [None] * 3
        results.append((dist.broadcast_object_list(objects, device=torch.device("cpu"), **root), objects))
    return results


@cell()
def scatter_object_list(dist: Any, rank: int, size: int) -> Any:
    """Into the first element of a list."""
    results = []
    for root in [{"src": each} for each in range(size)] + [{"group_src": size - 1}, {}]:
        here = rank == root.get("src", root.get("group_src", 0))
        output, inputs = [None, "stays"], [item(each + size) for each in range(size)] if here else None
        results.append((dist.scatter_object_list(output, inputs, **root), output))
    return results


@cell()
def tensors_and_arrays_in_objects(dist: Any, rank: int, size: int) -> Any:
    obj = {
        "weights": torch.arange(4.0).reshape(2, 2) + rank,
        "half": torch.ones(2, dtype=torch.bfloat16),
        "array": np.full(2, rank),
    }
    output: list[Any] = [None] * size
    dist.all_gather_object(output, obj)
    return [{**each, "array": (str(each["array"].dtype), each["array"].tolist())} for each in output]


@cell()
def what_arrives_is_a_copy(dist: Any, rank: int, size: int) -> Any:
    mine = [rank]
    output: list[Any] = [None] * size
    dist.all_gather_object(output, mine)
    mine.append("later")
    return output, output[rank] is mine


@cell()
def an_object_that_occurs_twice_is_one_object(dist: Any, rank: int, size: int) -> Any:
    shared = {"of": rank}
    output: list[Any] = [None] * size
    dist.all_gather_object(output, [shared, {"again": shared}, (np.ones(2),) * 2])
    return [(first is again["again"], one is other) for first, again, (one, other) in output]


@cell()
def arrays_keep_their_order(dist: Any, rank: int, size: int) -> Any:
    output: list[Any] = [None] * size
    dist.all_gather_object(output, np.asfortranarray(np.arange(6.0).reshape(2, 3)))
    return [(each.tolist(), each.flags.f_contiguous, each.flags.c_contiguous) for each in output]


@cell()
def an_object_that_contains_itself(dist: Any, rank: int, size: int) -> Any:
    loop: list[Any] = [rank]
    loop.append(loop)
    output: list[Any] = [None] * size
    dist.all_gather_object(output, loop)
    return [(each[0], each[1] is each) for each in output]


class Unwilling:
    """An object that refuses to be pickled."""

    def __reduce__(self) -> Any:
        raise ArithmeticError("not today")


@cell(sizes=(1, 2), obj=["lock", "lambda", "own error"])
def the_error_of_an_object_that_cannot_be_pickled(dist: Any, rank: int, size: int, obj: str) -> Any:
    unpicklable = {"lock": threading.Lock(), "lambda": lambda: None, "own error": Unwilling()}[obj]
    output: list[Any] = [None] * size
    try:
        dist.all_gather_object(output, [unpicklable])
    except Exception as error:
        return f"{type(error).__module__}.{type(error).__qualname__}", str(error).partition(" at 0x")[0], output
