"""Several ranks on several hosts, through the public API: ranks are processes, and a host is a directory of its own.

What tells hosts apart is which shared memory they see, so ranks with different RANKMESH_SHM_DIR are on different ones.
"""

from __future__ import annotations

import numpy as np
import pytest
from support import hosting
from support.processes import Me, Ranks

import rankmesh as dist

pytestmark = pytest.mark.processes


def medium() -> str:
    """Return what carries the world's collectives."""
    from rankmesh._session.session import communicator_of

    return communicator_of(None).medium


def run_short_of_memory(me: Me) -> None:
    import resource

    if me.rank >= 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))  # enough for what connects ranks of a host
    me.init()
    array = np.ones(100_000)
    dist.all_reduce(array)
    assert (array == me.size).all()
    me.report(medium=medium())
    dist.destroy_process_group()


@hosting.embedded_only("the agents of a cluster share one directory")
def test_a_host_without_shared_memory_is_told_in_one_warning_and_the_job_goes_over_tcp(ranks: Ranks) -> None:
    started = ranks.start(run_short_of_memory, 4, env=hosting.over("aabb", ranks.folder, 4))
    ranks.wait(started)
    assert [rank.code for rank in started] == [0] * 4, ranks.transcript()
    assert {rank.reported["medium"] for rank in started} == {"tcp"}
    assert started[0].stderr.count("collectives go over TCP, not shared memory") == 1
    assert not any(rank.complaints for rank in started[1:])
