"""Where the table goes over to the next algorithm, by the limits in use: right on both sides."""

from __future__ import annotations

import numpy as np
import pytest
from support.sweep.calls import CALLS
from support.sweep.cell import At, Cell
from support.sweep.media import OverCommunicator, Pool
from support.threads import World, in_threads, world

from rankmesh_agent.collectives.select import TABLE, Medium, algorithm
from rankmesh_agent.wire.ops import OpType

TRANSPORT: dict[Medium, str] = {"segment": "segment", "reads": "segment", "registered": "segment", "link": "tcp"}
SLOT_BYTES = 1 << 20
"""As the settings have it by default, for which the limits were measured."""
MOST_BYTES = 1 << 20
"""Larger arrays have none but the algorithms that take any size."""
SIZE = 4


def switches(medium: Medium) -> list[tuple[OpType, int]]:
    """Return each collective with the sizes, in bytes, up to which the table takes one algorithm and then another."""
    found = []
    for (kind, of), rows in TABLE.items():
        for limit in sorted({int(row.limit(SIZE)) for row in rows if 0 < row.limit(SIZE) <= MOST_BYTES}):
            before, after = (algorithm(kind, medium, nbytes, SIZE, SLOT_BYTES) for nbytes in (limit, limit + 4))
            if of == medium and before is not after:
                found.append((kind, limit))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("medium", [medium for medium in TRANSPORT if switches(medium)])
def test_both_sides_of_every_switch(medium: Medium) -> None:
    def call(made: World, rank: int) -> list[str]:
        comm = made.communicators[rank]
        place = Pool(comm, nbytes=(2 * SIZE + 2) * (MOST_BYTES + 64)).put if medium == "registered" else np.copy
        if medium == "segment":
            comm.queue.backend.segment.can_read = False  # type: ignore[attr-defined]
        wrong = []
        for kind, limit in switches(medium):
            for dtype, nbytes in (("float32", limit), ("float32", limit + 4), ("float16", limit + 4)):
                op = "SUM" if "REDUCE" in kind.name else ""
                cell = Cell(
                    kind.name.lower(), dtype, op, count=nbytes // np.dtype(dtype).itemsize, root=3, numbers="whole"
                )
                at = At(cell, OverCommunicator(comm), None, place)
                CALLS[cell.name](at)
                wrong += at.wrong()
        return wrong

    with world(SIZE, TRANSPORT[medium], slot_bytes=SLOT_BYTES) as made:
        assert in_threads(SIZE, lambda rank: call(made, rank)) == [[]] * SIZE
