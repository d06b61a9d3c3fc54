"""Random programs of calls have the same results, bit for bit, with the compiled core, without it, and over TCP."""

from __future__ import annotations

import pytest
from support.processes import Me, Ranks

import rankmesh as dist
from rankmesh_agent import native
from rankmesh_agent.shared_memory import mapping

SEEDS = 12
WAYS = {
    "in Python": ("shm", "0", False),
    "by the core": ("shm", "1", False),
    "one rank in Python, the next by the core": ("shm", "01", False),
    "the same, as on a processor that reorders accesses": ("shm", "01", True),
    "over TCP": ("tcp", "0", False),
    "over TCP, by the core": ("tcp", "1", False),
    "over TCP, one rank in Python, the next by the core": ("tcp", "01", False),
}

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(native.core is None, reason=f"the compiled core does not run: {native.reason}"),
]


def run_programs(me: Me, first: int, reorders: bool) -> None:
    from support.programs import Program

    mapping.TOTAL_STORE_ORDER = not reorders or native.core is None
    me.init(timeout=60)
    world = list(range(me.size))
    lists = [world, world[::-1], world[::2], world[:2]]
    groups = [(dist.new_group(ranks, sort_ranks=False), ranks) for ranks in lists]
    me.report(digests=[Program(seed, groups).run() for seed in range(first, first + SEEDS)])
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 3])
def test_results_are_the_same(ranks: Ranks, size: int) -> None:
    found = {}
    for way, (transport, core, reorders) in WAYS.items():

        def variables(rank: int, transport: str = transport, core: str = core) -> dict[str, str]:
            return {"RANKMESH_TRANSPORT": transport, "RANKMESH_NATIVE": core[rank % len(core)]}

        ran = ranks.run(run_programs, size, env=variables, first=100 * size, reorders=reorders)
        found[way] = [rank.reported["digests"] for rank in ran]
    assert found == dict.fromkeys(WAYS, found["in Python"])
