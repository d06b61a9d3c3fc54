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
    results = []
    for dst in range(size):
        output: list[Any] | None = [None] * size if rank == dst else None
        results.append((dist.gather_object(item(rank), output, dst=dst), output))
    return results


@cell()
def gather_object_at_the_default_rank(dist: Any, rank: int, size: int) -> Any:
    output: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(item(rank), output)
    return output


@cell()
def gather_object_at_a_group_rank(dist: Any, rank: int, size: int) -> Any:
    output: list[Any] | None = [None] * size if rank == size - 1 else None
    dist.gather_object(item(rank), output, group_dst=size - 1)
    return output


@cell()
def broadcast_object_list(dist: Any, rank: int, size: int) -> Any:
    results = []
    for src in range(size):
        objects = [item(0), item(1), item(2)] if rank == src else [None] * 3
        results.append((dist.broadcast_object_list(objects, src=src, device=torch.device("cpu")), objects))
    return results


@cell()
def broadcast_object_list_from_a_group_rank(dist: Any, rank: int, size: int) -> Any:
    objects: list[Any] = [rank, "of", rank]
    dist.broadcast_object_list(objects, group_src=size - 1)
    return objects


@cell()
def scatter_object_list(dist: Any, rank: int, size: int) -> Any:
    results = []
    for src in range(size):
        output: list[Any] = [None]
        inputs = [item(each + src) for each in range(size)] if rank == src else None
        results.append((dist.scatter_object_list(output, inputs, src=src), output))
    return results


@cell()
def scatter_object_list_into_the_first_of_several(dist: Any, rank: int, size: int) -> Any:
    output: list[Any] = [None, "stays"]
    dist.scatter_object_list(output, list(range(size)) if rank == size - 1 else [], group_src=size - 1)
    return output


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
