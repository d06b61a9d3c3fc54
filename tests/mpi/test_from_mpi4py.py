"""docs/mpi.md: the two columns of every row do the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from support.mpi import on_mpi
from support.processes import Me

import rankmesh as dist

PAGE = Path(__file__).parents[2] / "docs" / "mpi.md"
SIZE = 3


def rows() -> list[tuple[str, str]]:
    """Return the calls of the page: mpi4py's, and those in their place."""
    text = re.search(r"<!-- calls: begin -->\n(.*)<!-- calls: end -->", PAGE.read_text(), re.DOTALL)
    assert text is not None
    return re.findall(r"^\| `(.*)` \| `(.*)` \|$", text[1], re.MULTILINE)


def names(rank: int) -> dict[str, Any]:
    """Return the names that the page's calls use, with fresh arrays."""
    counts = [2, 0, 5]
    flat = np.arange(float(sum(counts))) + 100 * rank
    x = np.arange(4.0) + 10 * rank
    return {
        "rank": rank, "size": SIZE, "left": (rank - 1) % SIZE, "right": (rank + 1) % SIZE, "np": np,
        "x": x, "y": np.zeros(4), "xs": np.arange(12.0).reshape(3, 4) + 100 * rank, "ys": np.zeros((3, 4)),
        "counts": counts, "v": np.arange(float(counts[rank])) + 10 * rank, "flat": flat,
        "parts": np.split(flat, np.cumsum(counts)[:-1]), "taken": np.zeros(SIZE * counts[rank]),
        "o": {"rank": rank, "values": [1.5, None, "text"]}, "got": None,
    }  # fmt: skip


COMPARED = ("x", "y", "ys", "v", "flat", "taken", "got")


@on_mpi(SIZE)
def test_both_columns_of_every_row_do_the_same(me: Me) -> None:
    from mpi4py import MPI

    dist.init_process_group(timeout=60)
    found = rows()
    assert len(found) > 25
    for theirs, ours in found:
        by_mpi, by_mesh = names(dist.get_rank()), names(dist.get_rank())
        by_mpi |= {"MPI": MPI, "comm": MPI.COMM_WORLD}
        by_mesh |= {"dist": dist}
        exec(theirs, by_mpi)
        exec(ours, by_mesh)
        for name in COMPARED:
            assert type(by_mpi[name]) is type(by_mesh[name]), (ours, name)
            np.testing.assert_equal(by_mesh[name], by_mpi[name], f"{name} after {ours}")
    dist.destroy_process_group()
