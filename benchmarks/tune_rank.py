"""The program of a rank that is told by which algorithm to do a collective, for ``benchmarks.tune``.

The public call is made as ever; only what the table of ``select`` would pick is replaced on its way to be run. An
operation in an order is 'OPERATION MEDIUM ALGORITHM', or 'OPERATION MEDIUM ?' to hear what the table goes by.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.operations import OPERATIONS
from benchmarks.rank import main, timings
from benchmarks.worlds import World
from rankmesh_agent.backends.base import CallContext
from rankmesh_agent.backends.cpu import CpuBackend
from rankmesh_agent.collectives.select import candidates
from rankmesh_agent.wire.ops import OpType


class Switch:
    """Stands before CpuBackend.run and replaces the algorithm of one kind of call."""

    def __init__(self) -> None:
        self.kind: OpType | None = None
        self.algorithm: Any = None
        self.nbytes = -1
        self.reads = False
        self._run = CpuBackend.run
        switch = self

        def run(backend: CpuBackend, algorithm: Any, arguments: Sequence[Any], watch: CallContext) -> None:
            if watch.call.kind is switch.kind:
                switch.nbytes = watch.call.nbytes
                switch.reads = backend._segment is not None and backend._segment.windows.can_read
                algorithm = switch.algorithm or algorithm
            switch._run(backend, algorithm, arguments, watch)

        CpuBackend.run = run  # type: ignore[method-assign]

    def obey(self, world: World, operation: str, nbytes: int, calls: int, repetitions: int) -> list[float]:
        """Return the timings with the algorithm in the order; or the table's bytes, and whether memory is readable."""
        name, medium, wanted = operation.split()
        self.kind, self.algorithm = OpType[name.upper()], None
        if wanted == "?":
            OPERATIONS[name].for_bytes(world, nbytes).call()
            return [self.nbytes, self.reads]
        self.algorithm = {found.__name__: found for _, found in candidates(self.kind, medium)}[wanted]
        return timings(world, name, nbytes, calls, repetitions)


if __name__ == "__main__":
    main(*sys.argv[1:], obey=Switch().obey)
