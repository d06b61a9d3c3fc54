"""What only torch.distributed has, in a group over the mesh and in one of gloo's beside it: they give the same.

The cells are those of tests/support/cells/in_torch. Where gloo has nothing to compare, a cell checks for itself.
"""

from __future__ import annotations

import pytest
from support.cells import IN_TORCH
from support.sides import Worlds, cells_of

CASES = [(name, size) for size in (1, 2, 3) for name in cells_of(IN_TORCH, size)]


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds(tmp_path_factory.mktemp("groups"), IN_TORCH, "groups")


@pytest.mark.processes
@pytest.mark.parametrize(("name", "size"), CASES)
def test_a_group_over_the_mesh(groups: Worlds, name: str, size: int) -> None:
    for rank, told in enumerate(groups[size][name]):
        assert told["over"].error is None, f"rank {rank}: {told['over']}"
        if "gloo" in told:
            assert told["gloo"].error is None, f"rank {rank}: gloo raised {told['gloo']}"
            assert told["over"].value == told["gloo"].value, f"rank {rank}"
