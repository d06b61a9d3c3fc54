"""Every collective, operation, element type and container at several numbers of ranks, against NumPy, bit for bit.

The ranks are real processes: one start goes through all cells (support/sweep) of a number of ranks and a transport.
"""

from __future__ import annotations

from functools import partial

import pytest
from support.processes import Me, Ranks
from support.sweep.cover import SLOT_BYTES, cells_of

import rankmesh as dist

pytestmark = pytest.mark.processes

WORLDS = {1: ["shm"], 2: ["tcp", "shm"], 3: ["shm", "shm 0", "shm 01", "tcp"], 5: ["shm 10"]}
"""Numbers of ranks, and the transports with each: 0 and 1 are RANKMESH_NATIVE of the ranks in turn."""
SIZES = tuple(WORLDS)
GROUPS = {"all, reversed": SIZES, "every other one": tuple((size + 1) // 2 for size in SIZES)}
"""Groups of these worlds, and their numbers of ranks."""


def all_cells(me: Me, cells: dict[str, list[list[object]]]) -> None:
    from support.sweep.cover import sweep

    me.init(timeout=60)
    for space in ("api", "lists"):
        sweep(me, space, cells[space], dist)
    downwards = list(range(me.size))[::-1]
    for name, ranks in ("all, reversed", downwards), ("every other one", downwards[::2]):
        group = dist.new_group(ranks, group_desc=name, sort_ranks=False)
        if me.rank in ranks:
            sweep(me, name, cells[name], dist, group)
    dist.destroy_process_group()


def variables(transport: str, rank: int) -> dict[str, str]:
    name, _, native = transport.partition(" ")
    found = {"RANKMESH_TRANSPORT": name, "RANKMESH_SLOT_BYTES": str(8 * SLOT_BYTES)}
    return found | ({"RANKMESH_NATIVE": native[rank % len(native)]} if native else {})


@pytest.mark.parametrize(("world", "size"), [*enumerate(SIZES)])
def test_results_are_those_of_numpy(ranks: Ranks, world: int, size: int) -> None:
    cells = {space: cells_of(space, SIZES)[world] for space in ("api", "lists")}
    of_groups = cells_of("groups", (*GROUPS["all, reversed"], *GROUPS["every other one"]))
    cells |= {name: of_groups[world + len(SIZES) * number] for number, name in enumerate(GROUPS)}
    digests = set()
    for transport in WORLDS[size]:
        reported = [
            rank.reported for rank in ranks.run(all_cells, size, env=partial(variables, transport), cells=cells)
        ]
        for space in cells:
            found = [of_rank[space] for of_rank in reported if space in of_rank]
            assert len(found) == (GROUPS[space][world] if space in GROUPS else size)
            assert not [text for each in found for text in each["wrong"]]
            assert len({each["digest"] for each in found}) == 1, "all_reduce is the same bit for bit at all ranks"
        digests.add(reported[0]["api"]["digest"])
    assert len(digests) == 1, "all_reduce is the same bit for bit over any transport"
