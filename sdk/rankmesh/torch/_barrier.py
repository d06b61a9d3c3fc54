"""monitored_barrier for torch groups over the mesh: torch's own function refuses backends other than gloo."""

from __future__ import annotations

from typing import Any

from rankmesh._collectives.arguments import Timeout
from rankmesh.torch._group import rankmesh_group


def monitored_barrier(group: Any = None, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
    """Wait until all ranks of a torch group have come here, and say which did not come in time.

    Args:
        group: a torch process group of backend ``rankmesh``, the default one if None.
        timeout: how long to wait, timedelta or seconds; the group's by default.
        wait_all_ranks: name all ranks that did not come, not only the first.

    Raises:
        CollectiveTimeoutError: ranks did not come; every rank that came names them.
        TypeError: the group has another backend.
        As rankmesh.monitored_barrier.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.monitored_barrier
    """
    found = rankmesh_group(group)
    if found is not None:
        found.monitored_barrier(timeout, wait_all_ranks)
