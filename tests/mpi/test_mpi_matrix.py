"""The matrix of tests/sdk/test_matrix.py under backend "mpi": one mpirun for each number of ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.matrix import sweep
from support.mpi import once
from support.once import Said
from support.processes import Me

import rankmesh as dist

SIZES = (2, 3, 4)
Swept = Callable[[int], Said]

SOME = 2
"""Four ranks, on a machine that has fewer cores, go through every second cell only."""

each_size = pytest.mark.parametrize("size", SIZES)
each_part = pytest.mark.parametrize("part", sweep.PARTS, ids=lambda part: part.__name__)


def whole_matrix(me: Me, some: int) -> None:
    from support.matrix import sweep

    every = some if me.size == 4 else 1
    dist.init_process_group("mpi", timeout=60)
    assert dist.get_backend() == "mpi"
    for part in sweep.PARTS:
        sweep.sweep(me, part, every=every, any_order=True)
    downwards = list(range(me.size))[::-1]
    for ranks, name in (downwards, "all, reversed"), (downwards[::2], "every other one"):
        group = dist.new_group(ranks, group_desc=name, sort_ranks=False)
        for part in (sweep.containers, sweep.messages):
            sweep.sweep(me, part, group, every=3, any_order=True)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Swept:
    """What the ranks of a number of ranks said."""

    return once(tmp_path_factory, whole_matrix, some=SOME)


@each_part
@each_size
def test_results_are_those_of_numpy(swept: Swept, size: int, part: sweep.Part) -> None:
    said = [of_rank[part.__name__] for of_rank in swept(size)]
    assert not [text for found in said for text in found["wrong"]]
    assert {found["cells"] for found in said} == {
        len(sweep.cells_of(part, size, any_order=True)[:: SOME if size == 4 else 1])
    }


@each_size
@pytest.mark.parametrize("group", ["all, reversed", "every other one"])
@pytest.mark.parametrize("part", [sweep.containers, sweep.messages], ids=lambda part: part.__name__)
def test_groups_have_ranks_of_their_own(swept: Swept, size: int, group: str, part: sweep.Part) -> None:
    name = f"{part.__name__} in {group}"
    said = [of_rank[name] for of_rank in swept(size) if name in of_rank]
    assert len(said) == (size if group == "all, reversed" else (size + 1) // 2)
    assert not [text for found in said for text in found["wrong"]]


@each_part
@each_size
def test_all_reduce_is_the_same_bit_for_bit_at_all_ranks(swept: Swept, size: int, part: sweep.Part) -> None:
    assert len({of_rank[part.__name__]["digest"] for of_rank in swept(size)}) == 1
