"""The program of a rank that generates text with GPT-2 on order.

LAUNCHER python -m benchmarks.inference_worker LAYERS HEADS VOCABULARY LIBRARY SOCKET
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.adapters import Adapter, Array
from benchmarks.worker import main
from examples.gpt2 import GPT2, random_weights

WARM_UP = 2
"""Tokens before the timing: another implementation has had the processor's caches."""


def all_reduce_of(library: str) -> Callable[[Array], object]:
    """Return the sum of an array over the ranks, in place, as a program for a library has it."""
    if library == "mpi":
        from mpi4py import MPI

        return partial(MPI.COMM_WORLD.Allreduce, MPI.IN_PLACE)
    if library == "gloo":
        import torch
        import torch.distributed

        return lambda array: torch.distributed.all_reduce(torch.from_numpy(array))
    import rankmesh

    return rankmesh.all_reduce


class Generation:
    """A rank's model, whatever sums its arrays, and the seconds of each sum."""

    def __init__(self, library: str, *shape: int) -> None:
        self._library, self._shape, self._spent = library, shape, list[float]()
        self._model: GPT2 | None = None

    def __call__(self, world: Adapter, operation: str, nbytes: int, calls: int, repetitions: int) -> list[Any]:
        """Generate as many tokens as calls; return the seconds, those of each all_reduce, and the tokens."""
        if self._model is None:
            self._sum = all_reduce_of(self._library)
            self._model = GPT2(random_weights(*self._shape), world.rank, world.size, self._all_reduce)
        list(self._model.generate([0], WARM_UP))
        world.calls["barrier"]()()
        self._spent.clear()
        began = time.perf_counter()
        tokens = list(self._model.generate([0], calls))
        return [time.perf_counter() - began, self._spent, tokens]

    def _all_reduce(self, array: Array) -> None:
        began = time.perf_counter()
        self._sum(array)
        self._spent.append(time.perf_counter() - began)


if __name__ == "__main__":
    *numbers, one, path = sys.argv[1:]
    main(one, path, Generation(one, *map(int, numbers)))
