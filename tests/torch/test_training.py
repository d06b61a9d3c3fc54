"""Training with what torch has for it gives the same over the mesh as over gloo, in the same processes.

The programs are cells: ddp.py and sharding.py in tests/support/cells. The sum of two numbers is the
same in any order, so two ranks come to the same bits; with three there are several orders.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.backends import BACKENDS, Results, run_cells
from support.processes import Ranks
from support.sides import cells_of

MODULES = ["support.cells.ddp", "support.cells.sharding"]
SIZES = (2, 3)
CASES = [(name, size) for size in SIZES for name in cells_of(MODULES, size)]
HALVES = "float16|several_dtypes"
"""Cells that do not train in float32 alone: what is rounded to 8 or 11 bits goes further apart."""


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[int, str], Results]]:
    ranks = Ranks(tmp_path_factory.mktemp("worlds"))
    try:
        yield run_cells(ranks, MODULES, SIZES)
    finally:
        ranks.end()


def compare(found: Any, wanted: Any, size: int, tolerance: float, place: str) -> None:
    """Fail unless a rank found what is wanted: exactly with two ranks, about with more."""
    assert type(found) is type(wanted), place
    if isinstance(wanted, dict):
        assert list(found) == list(wanted), place
        for name in wanted:
            compare(found[name], wanted[name], size, tolerance, f"{place}, {name}")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), place
        for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
            compare(one, other, size, tolerance, f"{place}, {number}")
    elif isinstance(wanted, torch.Tensor | float):
        near = tolerance if size > 2 else 0.0
        torch.testing.assert_close(found, wanted, rtol=near, atol=near, msg=lambda text: f"{place}: {text}")
    else:
        assert found == wanted, place


@pytest.mark.processes
@pytest.mark.parametrize(("name", "size"), CASES)
def test_it_is_as_over_gloo(worlds: dict[tuple[int, str], Results], name: str, size: int) -> None:
    wanted, found = (worlds[size, backend].get(name, []) for backend in BACKENDS)
    for told in (wanted, found):
        assert len(told) == size, f"{name}: an earlier cell failed"
        assert not any(isinstance(one, dict) and "error" in one for one in told), told
    tolerance = 5e-2 if re.search(HALVES, name) else 1e-4
    for rank in range(size):
        compare(found[rank], wanted[rank], size, tolerance, f"rank {rank}")
