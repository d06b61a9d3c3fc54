"""monitored_barrier for torch groups over the mesh; torch's own function accepts gloo alone."""

from __future__ import annotations

from typing import Any

from rankmesh._collectives.arguments import Timeout
from rankmesh.torch._group import rankmesh_group


def monitored_barrier(group: Any = None, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
    """Wait until all ranks of a torch group have called it, or raise an error that names those that have not.

    Args:
        group: a torch process group of backend ``rankmesh``, the default one if None.
        timeout: timedelta or seconds; the group's default if None.
        wait_all_ranks: name all missing ranks, not only the first.

    Raises:
        CollectiveTimeoutError: ranks are missing; raised at every rank that called it.
        TypeError: the group has another backend.
        As rankmesh.monitored_barrier.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.monitored_barrier
    """
    found = rankmesh_group(group)
    if found is not None:
        found.monitored_barrier(timeout, wait_all_ranks)
