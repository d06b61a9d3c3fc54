"""What is measured."""

from __future__ import annotations

import pytest

from benchmarks.peers import PEERS
from benchmarks.plan import FULL, PROTOTYPES, QUICK, RANKS, SIZES, Cell, Effort, Figures


def test_every_rankmesh_cell_has_its_prototype() -> None:
    transports = [peer.name for peer in PEERS if peer.library == "rankmesh"]
    assert set(PROTOTYPES) == {Cell(name, ranks, size) for name in transports for ranks in RANKS for size in SIZES}


def test_quick_measures_the_same_cells_less_often() -> None:
    assert (QUICK.ranks, QUICK.sizes) == (FULL.ranks, FULL.sizes)
    assert QUICK.rounds * QUICK.repetitions * QUICK.seconds < FULL.rounds * FULL.repetitions * FULL.seconds / 4


@pytest.mark.parametrize(("seconds_a_call", "calls"), [(1e-9, 50), (0.01, 10), (5.0, 1)])
def test_calls_fill_the_time(seconds_a_call: float, calls: int) -> None:
    assert Effort(seconds=0.1, most_calls=50).calls(seconds_a_call) == calls


def test_ratios_to_a_range_are_to_its_middle() -> None:
    assert Figures(300, 500).middle == 400
