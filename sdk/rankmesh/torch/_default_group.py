"""torch's default process group for a script that has only called rankmesh.init_process_group()."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as c10d

from rankmesh._session import session
from rankmesh._session.process_group import NonMember
from rankmesh._session.process_group import ProcessGroup as MeshGroup
from rankmesh._session.ranks import get_process_group_ranks, require_member
from rankmesh._session.session import communicator_of
from rankmesh.torch._functions import new_members_group
from rankmesh.torch._group import ProcessGroup
from rankmesh.torch._store import fresh_job_store

_made: ProcessGroup | None = None
"""The default group that this module created last."""
_made_of: object = None
"""The agent of its session then: another one if the world has grown since."""


def ensure_default_group() -> None:
    """Create torch's default process group from rankmesh's session, unless torch has one or there is no session.

    All ranks call it. ``torch.distributed.destroy_process_group()`` ends the group. A group created earlier, of a
    session that has ended since, ends here.
    """
    global _made, _made_of
    world = session.current()
    agent = None if world is None else world.agent
    if _made is not None and _made is c10d.group.WORLD and (_made.session is not world or _made_of is not agent):
        c10d.destroy_process_group()
    if world is None or c10d.is_initialized():
        return
    comm = communicator_of(world.group)
    c10d.init_process_group(
        "rankmesh",
        store=fresh_job_store(),
        rank=comm.rank,
        world_size=comm.size,
        timeout=timedelta(seconds=comm.timeout),
    )
    _made, _made_of = c10d.group.WORLD, agent


def torch_group(group: Any) -> Any:
    """Return a torch process group with the members of one of rankmesh's groups; any other object unchanged.

    All members of the group call it; while torch has no default group, all ranks of the world.
    """
    if not isinstance(group, MeshGroup | NonMember):
        return group
    ensure_default_group()
    ranks = get_process_group_ranks(require_member(group))
    return new_members_group(sorted(ranks))
