"""A forked child lets go of nothing that uses a GPU: it must not call CUDA."""

from __future__ import annotations

import os

import pytest
from support.processes import Me, Ranks

import rankmesh as dist

pytestmark = pytest.mark.processes


def forking(me: Me) -> None:
    import gc

    class Freed:
        """What calls CUDA when it is let go of, as a communicator of CuPy's does."""

        def __del__(self) -> None:
            os.write(1, f'{{"freed in the {"parent" if os.getpid() == parent else "child"}": true}}\n'.encode())

    parent = os.getpid()
    me.init(timeout=60)
    dist.group.WORLD.kept = Freed()
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        me.report(status=status)
        del dist.group.WORLD.kept
        dist.destroy_process_group()
    else:
        gc.collect()


def test_a_forked_child_frees_nothing(ranks: Ranks) -> None:
    (rank,) = ranks.run(forking, 1)
    assert rank.reported == {"status": 0, "freed in the parent": True}
