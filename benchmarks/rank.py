"""The program of a rank: join the world of one library and time its operations when told to.

    LAUNCHER python -m benchmarks.rank LIBRARY SOCKET

Between orders a rank waits for its socket and takes no processor time, so that peers can take turns.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.channel import Channel
from benchmarks.operations import OPERATIONS, Prepared
from benchmarks.patterns import fill, wrong
from benchmarks.worlds import JOIN, Call, World

LIFETIME = 3600
"""Seconds after which a rank that everybody forgot ends itself."""


def timings(world: World, operation: str, nbytes: int, calls: int, repetitions: int) -> list[float]:
    """Return the seconds an operation takes, for each repetition of ``calls`` calls on arrays of ``nbytes``.

    Raises:
        ArithmeticError: a result is wrong, before the timings or after them.
    """
    prepared = OPERATIONS[operation].for_bytes(world, nbytes)
    meet = world.barrier()
    check(world, operation, prepared)
    for array, _ in [*prepared.inputs, *prepared.outputs]:
        array.fill(0)  # sums of zeros stay zeros, however many calls
    timed(prepared.call, calls // 10)
    seconds = []
    for _ in range(repetitions):
        meet()
        seconds.append(timed(prepared.call, calls) / (calls * prepared.units))
    check(world, operation, prepared)
    return seconds


def timed(call: Call, calls: int) -> float:
    """Return the seconds so many calls take, one after the other."""
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - began


def check(world: World, operation: str, prepared: Prepared) -> None:
    """Do the operation once on known contents and compare every element with what it must be.

    Raises:
        ArithmeticError: an element is something else.
    """
    for array, _ in prepared.outputs:
        array.fill(0)
    for array, number in prepared.inputs:
        fill(array, number)
    prepared.call()
    for array, number in prepared.outputs:
        difference = wrong(array, number)
        if difference is not None:
            raise ArithmeticError(
                f"{world.version}, {operation}, rank {world.rank} of {world.size}: the result is wrong: {difference}"
            )


def main(library: str, path: str, obey: Callable[..., object] = timings) -> None:
    """Obey until the benchmark closes the socket.

    Args:
        library: key of ``worlds.JOIN``.
        path: the socket.
        obey: takes the world and what an order says, and returns the answer.
    """
    signal.alarm(LIFETIME)
    channel = Channel.connect(Path(path))
    world = JOIN[library]()
    channel.send({"rank": world.rank, "size": world.size, "version": world.version})
    while (order := channel.receive()) is not None:
        channel.send({"seconds": obey(world, **order)})
    world.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
