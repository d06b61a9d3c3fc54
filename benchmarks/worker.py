"""The program of a rank: joins the world of one library and times operations on order.

    LAUNCHER python -m benchmarks.worker LIBRARY SOCKET

Between orders a rank waits for its socket and takes no processor time, so that implementations can take turns.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import gpu
from benchmarks.adapters import JOIN, Adapter, Call
from benchmarks.operations import OPERATIONS, Prepared
from benchmarks.patterns import difference, fill
from benchmarks.workers import Channel

LIFETIME = 3600
"""Seconds after which a rank without a benchmark ends itself."""


def timings(
    world: Adapter, operation: str, nbytes: int, calls: int, repetitions: int, clock: str = "perf_counter"
) -> list[float]:
    """Return the seconds of an operation, for each repetition; raise ArithmeticError if a result is wrong.

    ``clock`` is the function of ``time`` that measures them: perf_counter, or process_time for the processor time.
    """
    prepared = OPERATIONS[operation].for_bytes(world, nbytes)
    barrier = world.calls["barrier"]() if prepared.together else (lambda: None)
    check(world, operation, prepared)
    for array, _ in [*prepared.inputs, *prepared.outputs]:
        array.fill(0)  # sums of zeros stay zeros, however many calls
    timed(prepared.call, calls // 10, world.finish)
    seconds = []
    for _ in range(repetitions):
        barrier()
        seconds.append(timed(prepared.call, calls, world.finish, getattr(time, clock)) / (calls * prepared.units))
    check(world, operation, prepared)
    return seconds


def timed(call: Call, calls: int, finish: Call = lambda: None, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of ``calls`` calls, one after the other, until the last has finished."""
    began = clock()
    for _ in range(calls):
        call()
    finish()
    return clock() - began


def check(world: Adapter, operation: str, prepared: Prepared) -> None:
    """Carry the operation out once on known contents; raise ArithmeticError if an element of the result is wrong."""
    for array, _ in prepared.outputs:
        array.fill(0)
    for array, number in prepared.inputs:
        fill(array, number)
    prepared.call()
    for array, number in prepared.outputs:
        wrong = difference(array, number)
        if wrong is not None:
            raise ArithmeticError(f"{world.version}, {operation}, rank {world.rank} of {world.size}: {wrong}")


def main(library: str, path: str, carry_out: Callable[..., object] = timings) -> None:
    """Join by a key of ``adapters.JOIN``, or for arrays on GPUs, and carry out orders until the socket is closed."""
    signal.alarm(LIFETIME)
    channel = Channel.connect(Path(path))
    world = JOIN.get(library, partial(gpu.join, library))()
    channel.send({"rank": world.rank, "size": world.size, "version": world.version})
    while (order := channel.receive()) is not None:
        channel.send({"seconds": carry_out(world, **order)})
    world.leave()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
