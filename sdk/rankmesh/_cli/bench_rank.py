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
    """An operation: what carries it out once, and the bytes that each rank sends per byte of the size."""

    call: Callable[[], Any]
    result: Any = 0
    expected: Any = 0
    bus: float = 0.0


def case(op: str, nbytes: int, rank: int, size: int) -> Case:
    """Return an operation on float32 arrays, the larger of input and output of about ``nbytes`` bytes."""
    share, is_root, rest = max(1, nbytes // 4 // size), rank == 0, (size - 1) / size
    split = op in ("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")
    whole = np.zeros(share * size if split else max(1, nbytes // 4), np.float32)
    mine = np.full(share, rank, np.float32)
    every = np.repeat(np.arange(size, dtype=np.float32), share)
    parts = list(whole.reshape(size, share)) if split and is_root else None
    sent = np.full(whole.size if op == "all_to_all" else 0, rank, np.float32)
    before: dict[str, Any] = {"broadcast": rank, "scatter": every, "reduce_scatter": every}
    whole[:] = before.get(op, 0)
    return {
        "all_reduce": Case(lambda: dist.all_reduce(whole), whole, 0, 2 * rest),
        "reduce": Case(lambda: dist.reduce(whole, 0), whole if is_root else 0, 0, 1.0),
        "broadcast": Case(lambda: dist.broadcast(whole, 0), whole, 0, 1.0),
        "all_gather": Case(lambda: dist.all_gather_into_tensor(whole, mine), whole, every, rest),
        "gather": Case(lambda: dist.gather(mine, parts, 0), whole if is_root else every, every, rest),
        "scatter": Case(lambda: dist.scatter(mine, parts, 0), mine, rank, rest),
        "reduce_scatter": Case(lambda: dist.reduce_scatter_tensor(mine, whole), mine, rank * size, rest),
        "all_to_all": Case(lambda: dist.all_to_all_single(whole, sent), whole, every, rest),
        "barrier": Case(dist.barrier),
    }[op]


def measure(op: str, nbytes: int, budget: float) -> dict[str, Any]:
    """Measure an operation; collective over all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    prepared = case(op, nbytes, rank, size)
    prepared.call()
    if np.any(prepared.result != prepared.expected):
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
        "medium": session.require_session().group._communicator.medium,
    }


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
