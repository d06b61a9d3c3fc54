"""The calls of the matrix that take lists of arrays, one a device elsewhere: with one, two or three arrays a rank."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import rankmesh as dist
from support.matrix.cell import At, Cell
from support.matrix.containers import Array


def _all_reduce(at: At, k: int) -> None:
    total = at.reduction(_everything(at, k))
    tensors = [at.becomes(at.values(at.rank, lane=lane), total) for lane in range(k)]
    at.call(dist.all_reduce_multigpu, tensors, at.op)


def _reduce(at: At, k: int) -> None:
    total, chosen = at.reduction(_everything(at, k)), k - 1
    mine = [at.values(at.rank, lane=lane) for lane in range(k)]
    tensors = [at.becomes(array, total if at.is_root and lane == chosen else array) for lane, array in enumerate(mine)]
    at.call(dist.reduce_multigpu, tensors, at.numbers[at.cell.root], at.op, dst_tensor=chosen)


def _reduce_scatter(at: At, k: int) -> None:
    """Output j of rank r gets the reduction of array r * k + j of all lists of all ranks, in the order of these."""

    def value(rank: int, number: int, of: int) -> Array:
        return at.values(rank, lane=number * at.size * k + of)

    outputs = [
        at.wanted(at.reduction([(rank, value(rank, i, at.rank * k + j)) for rank in at.ranks for i in range(k)]))
        for j in range(k)
    ]
    inputs = [[at.given(value(at.rank, i, of)) for of in range(at.size * k)] for i in range(k)]
    at.call(dist.reduce_scatter_multigpu, outputs, inputs, at.op)


def _broadcast(at: At, k: int) -> None:
    root, chosen = at.cell.root, k - 1
    tensors = [at.becomes(at.values(at.rank, lane=lane), at.values(root, lane=chosen)) for lane in range(k)]
    at.call(dist.broadcast_multigpu, tensors, at.numbers[root], src_tensor=chosen)


def _all_gather(at: At, k: int) -> None:
    outputs = [[at.wanted(array) for _, array in _everything(at, k)] for _ in range(k)]
    at.call(dist.all_gather_multigpu, outputs, [at.given(at.values(at.rank, lane=lane)) for lane in range(k)])


def _everything(at: At, k: int) -> list[tuple[int, Array]]:
    """Return all arrays of all ranks, each with its rank."""
    return [(rank, at.values(rank, lane=lane)) for rank in at.ranks for lane in range(k)]


def _of_each_length(*functions: Callable[..., None]) -> dict[str, Callable[[At], None]]:
    return {
        f"{function.__name__.strip('_')}_multigpu of {k}": functools.partial(function, k=k)
        for function, k in itertools.product(functions, (1, 2, 3))
    }


REDUCING_LISTS = _of_each_length(_all_reduce, _reduce, _reduce_scatter)
MOVING_LISTS = _of_each_length(_broadcast, _all_gather)
LISTS = REDUCING_LISTS | MOVING_LISTS


def lists(choice: random.Random, size: int) -> Iterator[Cell]:
    """Every call with every length, and some operations and element types."""

    def rest() -> tuple[Any, ...]:
        container = choice.choice(("contiguous", "strided", "transposed", "byteswapped"))
        return container, choice.choice((0, 1, 15)), choice.random() < 0.5, choice.randrange(size)

    for dtype in ("int32", "float16", "float32"):
        for name, op in itertools.product(REDUCING_LISTS, ("SUM", "AVG", "MAX", "PREMUL_SUM")):
            yield Cell(name, dtype, op, *rest())
        for name in MOVING_LISTS:
            yield Cell(name, dtype, "", *rest())
