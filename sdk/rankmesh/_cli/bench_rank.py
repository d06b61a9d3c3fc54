"""A rank of ``rankmesh bench``: checks each operation once, times it, and prints the result at rank 0."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import rankmesh as dist
from rankmesh._session import session

_BATCHES = 7
_MOST_CALLS = 20_000
_WARM_UP = 3


class Case(NamedTuple):
    """An operation with its arrays.

    Attributes:
        call: carries it out once.
        check: whether the result is right after one call.
        bus: bytes that each rank sends per byte of the size.
    """

    call: Callable[[], Any]
    check: Callable[[], bool]
    bus: float


def case(op: str, nbytes: int, rank: int, size: int) -> Case:
    """Return an operation on float32 arrays, the larger of input and output of about ``nbytes`` bytes."""
    share = max(1, nbytes // 4 // size)
    count = share * size if op in ("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all") else nbytes // 4
    whole = np.zeros(max(1, count), np.float32)
    mine = np.full(share, rank, np.float32)
    parts = list(whole.reshape(size, share)) if whole.size == share * size else []
    everyone = np.repeat(np.arange(size, dtype=np.float32), share)
    rest = (size - 1) / size
    match op:
        case "all_reduce":
            return Case(lambda: dist.all_reduce(whole), lambda: _same(whole, 0), 2 * rest)
        case "reduce":
            return Case(lambda: dist.reduce(whole, 0), lambda: rank != 0 or _same(whole, 0), 1.0)
        case "broadcast":
            whole[:] = rank
            return Case(lambda: dist.broadcast(whole, 0), lambda: _same(whole, 0), 1.0)
        case "all_gather":
            return Case(lambda: dist.all_gather_into_tensor(whole, mine), lambda: _same(whole, everyone), rest)
        case "gather":
            into = parts if rank == 0 else None
            return Case(lambda: dist.gather(mine, into, 0), lambda: rank != 0 or _same(whole, everyone), rest)
        case "scatter":
            whole[:] = everyone
            source = parts if rank == 0 else None
            return Case(lambda: dist.scatter(mine, source, 0), lambda: _same(mine, rank), rest)
        case "reduce_scatter":
            whole[:] = everyone
            return Case(lambda: dist.reduce_scatter_tensor(mine, whole), lambda: _same(mine, rank * size), rest)
        case "all_to_all":
            sent = np.full(whole.size, rank, np.float32)
            return Case(lambda: dist.all_to_all_single(whole, sent), lambda: _same(whole, everyone), rest)
    return Case(dist.barrier, lambda: True, 0.0)


def _same(array: np.ndarray[Any, Any], expected: Any) -> bool:
    return bool((array == expected).all())


def measure(op: str, nbytes: int, budget: float) -> dict[str, Any]:
    """Measure an operation; collective over all ranks.

    Raises:
        ArithmeticError: the result is wrong.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    prepared = case(op, nbytes, rank, size)
    prepared.call()
    if not prepared.check():
        raise ArithmeticError(f"{op} of {nbytes} bytes: the result at rank {rank} is wrong")
    slowest = np.array([min(_timed(prepared.call, 1) for _ in range(_WARM_UP))])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)  # all ranks make the same number of calls
    calls = int(max(1, min(_MOST_CALLS, budget / _BATCHES / slowest[0])))
    batches = np.zeros(_BATCHES)
    for number in range(_BATCHES):
        dist.barrier()
        batches[number] = _timed(prepared.call, calls) / calls
    dist.all_reduce(batches, dist.ReduceOp.MAX)
    median = statistics.median(batches.tolist())
    return {
        "op": op,
        "bytes": nbytes,
        "seconds": median,
        "least": float(batches.min()),
        "bandwidth": nbytes / median,
        "bus_bandwidth": prepared.bus * nbytes / median,
        "calls": calls * _BATCHES,
        "medium": _medium(),
    }


def _medium() -> str:
    """Return the medium of the collectives, as in GroupInfo."""
    world = session.current()
    return "" if world is None else world.group._communicator.medium


def _timed(call: Callable[[], Any], calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - began


def main() -> None:
    """Measure the plan of the command line."""
    plan = json.loads(sys.argv[1])
    dist.init_process_group()
    for op in plan["ops"]:
        for nbytes in plan["sizes"] if op != "barrier" else [0]:
            found = measure(op, nbytes, plan["budget"])
            if dist.get_rank() == 0:
                print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
