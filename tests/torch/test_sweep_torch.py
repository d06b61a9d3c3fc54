"""The sweep of tests/sdk/test_sweep.py over CPU tensors of torch.distributed with backend "rankmesh"."""

from __future__ import annotations

import pytest
from support.processes import Me, Ranks
from support.sweep.cover import cells_of

pytestmark = pytest.mark.processes

SIZES = (1, 2, 3)


def all_cells(me: Me, cells: list[list[object]]) -> None:
    import warnings

    import torch.distributed
    from support.sweep.cover import sweep
    from support.sweep.over_torch import OverTorch

    import rankmesh.torch  # noqa: F401  # the backend

    warnings.simplefilter("ignore", FutureWarning)  # torch's, of functions that it renames
    method = f"file://{me.folder}/rendezvous"
    torch.distributed.init_process_group("rankmesh", init_method=method, rank=me.rank, world_size=me.size)
    sweep(me, "found", cells, OverTorch())
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("world", "size"), [*enumerate(SIZES)])
def test_results_are_those_of_numpy(ranks: Ranks, world: int, size: int) -> None:
    # torch refuses products of complex numbers before a backend sees them.
    cells = [cell for cell in cells_of("torch", SIZES)[world] if (cell.dtype[:7], cell.op) != ("complex", "PRODUCT")]
    found = [rank.reported["found"] for rank in ranks.run(all_cells, size, cells=cells)]
    assert not [text for each in found for text in each["wrong"]]
    assert len({each["digest"] for each in found}) == 1, "all_reduce is the same bit for bit at all ranks"
