"""Every collective, operation, element type and container at several numbers of ranks, against NumPy, bit for bit.

The ranks are real processes: one start goes through all cells (support/sweep) of a number of ranks and a transport.
"""

from __future__ import annotations

import pytest
from support.processes import Me, Ranks
from support.sweep.cover import SLOT_BYTES, cells_of

import rankmesh as dist

pytestmark = pytest.mark.processes

WORLDS = {1: ["shm"], 2: ["shm", "tcp"], 3: ["shm", "tcp"], 4: ["tcp"], 7: ["shm"]}
"""Numbers of ranks, and the transports with each."""
SPACES = ("api", "lists")
GROUPS = ("groups in all, reversed", "groups in every other one")


def all_cells(me: Me, spaces: list[str]) -> None:
    from support.sweep.cover import sweep

    me.init(timeout=60)
    for space in spaces:
        sweep(me, space)
    downwards = list(range(me.size))[::-1]
    for ranks, name in (downwards, "all, reversed"), (downwards[::2], "every other one"):
        sweep(me, "groups", dist.new_group(ranks, group_desc=name, sort_ranks=False), every=3)
    dist.destroy_process_group()


@pytest.mark.parametrize("size", WORLDS)
def test_results_are_those_of_numpy(ranks: Ranks, size: int) -> None:
    digests = set()
    for transport in WORLDS[size]:
        environment = {"RANKMESH_TRANSPORT": transport, "RANKMESH_SLOT_BYTES": str(8 * SLOT_BYTES)}
        said = [rank.said for rank in ranks.run(all_cells, size, env=environment, spaces=SPACES)]
        for space in (*SPACES, *GROUPS):
            found = [of_rank[space] for of_rank in said if space in of_rank]
            assert len(found) == ((size + 1) // 2 if space == GROUPS[1] else size)
            assert not [text for each in found for text in each["wrong"]]
            assert len({each["digest"] for each in found}) == 1, "all_reduce is the same bit for bit at all ranks"
        assert [said[0][space]["cells"] for space in SPACES] == [len(cells_of(space, size)) for space in SPACES]
        digests.add(said[0]["api"]["digest"])
    assert len(digests) == 1, "all_reduce is the same bit for bit over any transport"
