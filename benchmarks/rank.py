"""The program of a rank: join the world of one library and time its all_reduce when told to.

    LAUNCHER python -m benchmarks.rank LIBRARY SOCKET

Between orders a rank waits for its socket and takes no processor time, so that peers can take turns.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.channel import Channel
from benchmarks.worlds import JOIN, Call, World

LIFETIME = 900
"""Seconds after which a rank that everybody forgot ends itself."""


def timings(world: World, nbytes: int, calls: int, repetitions: int) -> list[float]:
    """Return the seconds a call takes, for each repetition of ``calls`` calls, on a float32 array of ``nbytes``."""
    array = np.empty(nbytes // 4, np.float32)
    all_reduce = world.all_reduce(array)
    meet = world.all_reduce(np.zeros(1, np.float32))
    check(world, array, all_reduce)
    array.fill(0)  # sums of zeros stay zeros, however many calls
    for _ in range(1 + calls // 10):
        all_reduce()
    seconds = []
    for _ in range(repetitions):
        meet()
        began = time.perf_counter()
        for _ in range(calls):
            all_reduce()
        seconds.append((time.perf_counter() - began) / calls)
    check(world, array, all_reduce)
    return seconds


def check(world: World, array: np.ndarray, all_reduce: Call) -> None:
    """Add up the ranks' numbers and compare every element with what the sum must be.

    Raises:
        ArithmeticError: an element is not the sum.
    """
    array.fill(world.rank + 1)
    all_reduce()
    wanted = world.size * (world.size + 1) // 2
    wrong = np.flatnonzero(array != wanted)
    if wrong.size:
        first = wrong[0]
        raise ArithmeticError(
            f"{world.version}, rank {world.rank} of {world.size}: {wrong.size} of {array.size} sums are wrong; "
            f"element {first} is {array[first]}, not {wanted}"
        )


def main(library: str, path: str) -> None:
    """Obey until the benchmark closes the socket."""
    signal.alarm(LIFETIME)
    channel = Channel.connect(Path(path))
    world = JOIN[library]()
    channel.send({"rank": world.rank, "size": world.size, "version": world.version})
    while (order := channel.receive()) is not None:
        channel.send({"seconds": timings(world, **order)})
    world.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
