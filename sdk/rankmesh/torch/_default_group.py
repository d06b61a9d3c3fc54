"""torch's process groups for a script that has called rankmesh.init_process_group() alone."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as c10d

from rankmesh._session import session
from rankmesh._session.process_group import NonMember
from rankmesh._session.process_group import ProcessGroup as MeshGroup
from rankmesh._session.ranks import get_process_group_ranks, require_member
from rankmesh.torch._group import ProcessGroup
from rankmesh.torch._store import fresh_job_store

_made: ProcessGroup | None = None
"""The default group that was last made here."""


def ensure_default_group() -> None:
    """Make torch's default process group of rankmesh's world, unless torch has one or there is no world.

    All ranks call it. The group is torch's in every way, and ``torch.distributed.destroy_process_group()`` ends it; one
    made earlier of a world that is gone since ends here.
    """
    global _made
    world = session.current()
    if _made is not None and _made is c10d.group.WORLD and _made.world is not world:
        c10d.destroy_process_group()
    if world is None or c10d.is_initialized():
        return
    comm = world.group._communicator
    c10d.init_process_group(
        "rankmesh",
        store=fresh_job_store(),
        rank=comm.rank,
        world_size=comm.size,
        timeout=timedelta(seconds=comm.timeout),
    )
    _made = c10d.group.WORLD


def torch_group(group: Any) -> Any:
    """Return a torch process group with the members of one of rankmesh's groups; any other object as it is.

    The group's members call it, all of them; while torch has no default group, all ranks of the world.

    Raises:
        ValueError: this process is not a member.
    """
    if not isinstance(group, MeshGroup | NonMember):
        return group
    ensure_default_group()
    ranks = get_process_group_ranks(require_member(group))
    return c10d.new_group(ranks, backend="rankmesh", use_local_synchronization=True)
