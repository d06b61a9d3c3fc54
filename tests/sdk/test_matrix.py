"""Every collective, operation, element type and container at several numbers of ranks, against NumPy, bit for bit.

The ranks are real processes: one start goes through all cells (support/matrix) of a number of ranks and a
transport, and the tests look at what its parts found.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.matrix import sweep
from support.once import Said, once
from support.processes import Me, Rank, Ranks

import rankmesh as dist

pytestmark = pytest.mark.processes

SIZES = (1, 2, 3, 4, 7)
TRANSPORTS = ("shm", "tcp")
WORLDS = [(size, transport) for size in SIZES for transport in TRANSPORTS[:size]]
SOME = {4: 2, 7: 6}
"""More ranks than the machine has cores go through some of the cells only: one of so many."""
SLOT_BYTES = 1 << 16
"""Small slots of the shared memory, so that large arrays take several steps."""

Swept = Callable[[int, str], Said]

each_world = pytest.mark.parametrize(("size", "transport"), WORLDS)
each_part = pytest.mark.parametrize("part", sweep.PARTS, ids=lambda part: part.__name__)


def whole_matrix(me: Me, every: int) -> None:
    from support.matrix import sweep

    me.init(timeout=60)
    for part in sweep.PARTS:
        sweep.sweep(me, part, every=every)
    downwards = list(range(me.size))[::-1]
    for ranks, name in (downwards, "all, reversed"), (downwards[::2], "every other one"):
        group = dist.new_group(ranks, group_desc=name, sort_ranks=False)
        for part in (sweep.containers, sweep.messages):
            sweep.sweep(me, part, group, every=3 * every)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Swept:
    """What the ranks of a number of ranks and a transport said."""

    def start(ranks: Ranks, size: int, transport: str) -> list[Rank]:
        environment = {"RANKMESH_TRANSPORT": transport, "RANKMESH_SLOT_BYTES": str(SLOT_BYTES)}
        started = ranks.start(whole_matrix, size, env=environment, every=every(size))
        ranks.succeed(started, seconds=120)
        return started

    return once(tmp_path_factory, start)


def every(size: int) -> int:
    return SOME.get(size, 1)


@each_part
@each_world
def test_results_are_those_of_numpy(swept: Swept, size: int, transport: str, part: sweep.Part) -> None:
    said = [of_rank[part.__name__] for of_rank in swept(size, transport)]
    assert not [text for found in said for text in found["wrong"]]
    assert {found["cells"] for found in said} == {len(sweep.cells_of(part, size)[:: every(size)])}


@each_world
@pytest.mark.parametrize("group", ["all, reversed", "every other one"])
@pytest.mark.parametrize("part", [sweep.containers, sweep.messages], ids=lambda part: part.__name__)
def test_groups_have_ranks_of_their_own(swept: Swept, size: int, transport: str, group: str, part: sweep.Part) -> None:
    name = f"{part.__name__} in {group}"
    said = [of_rank[name] for of_rank in swept(size, transport) if name in of_rank]
    assert len(said) == (size if group == "all, reversed" else (size + 1) // 2)
    assert not [text for found in said for text in found["wrong"]]


@each_part
@each_world
def test_all_reduce_is_the_same_bit_for_bit_at_all_ranks(
    swept: Swept, size: int, transport: str, part: sweep.Part
) -> None:
    assert len({of_rank[part.__name__]["digest"] for of_rank in swept(size, transport)}) == 1


@each_part
@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_reduce_is_the_same_bit_for_bit_over_any_transport(swept: Swept, size: int, part: sweep.Part) -> None:
    assert (
        len({of_rank[part.__name__]["digest"] for transport in TRANSPORTS for of_rank in swept(size, transport)}) == 1
    )
