"""Functions for torch groups over the mesh: those that torch has for gloo alone, and its default group of our world."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as c10d
from torch.distributed.constants import default_pg_timeout

from rankmesh._collectives.arguments import Timeout
from rankmesh._session import session
from rankmesh._session.groups import check_split
from rankmesh._session.process_group import NonMember
from rankmesh._session.process_group import ProcessGroup as MeshGroup
from rankmesh._session.ranks import get_process_group_ranks, require_member
from rankmesh._session.session import communicator_of
from rankmesh.torch._group import ProcessGroup
from rankmesh.torch._store import fresh_job_store

_splits: Counter[str] = Counter()
"""Number of groups made so far, by members. It is part of a group's name, so that no name is used twice."""


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
    """
    found = _rankmesh_group(group)
    if found is not None:
        found.monitored_barrier(timeout, wait_all_ranks)


def split_group(
    parent_pg: Any = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> Any:
    """Split a group's members into torch groups; each member calls it and gets the group it is in.

    Args:
        parent_pg: a torch process group of backend ``rankmesh``, the default one if None.
        split_ranks: the members of each new group, as ranks in ``parent_pg``; the new ranks are in their order there.
        timeout: default timeout of the new group's calls; torch's default if None.
        pg_options, group_desc: as for torch.distributed.new_group.

    Returns:
        The group this rank is in, None if it is in none.

    Raises:
        ValueError: ``split_ranks`` is empty or has an empty list, a rank twice or one out of range; or this process is
            not in ``parent_pg``.
    """
    parent = _rankmesh_group(parent_pg)
    if parent is None:
        raise ValueError("this process is not a member of the group")
    parent_ranks = c10d.get_process_group_ranks(parent)
    split = check_split(split_ranks, "split_ranks", len(parent_ranks), "the ranks of parent_pg")
    mine = next((ranks for ranks in split if parent.rank() in ranks), None)
    if mine is None:
        return None
    return new_members_group([parent_ranks[rank] for rank in sorted(mine)], timeout, pg_options, group_desc)


def new_members_group(
    ranks: list[int], timeout: timedelta | None = None, pg_options: Any = None, group_desc: str | None = None
) -> Any:
    """Create a torch group of some ranks of torch's default group; only they call it.

    torch.distributed.new_group names a group by the number of groups there are: a name that an older one may have. A
    group that only its members make with it also changes the names of later ones at these ranks alone, in torch 2.14.
    """
    members = "_".join(map(str, ranks))
    _splits[members] += 1
    torchs = c10d.distributed_c10d
    group, _ = torchs._new_process_group_helper(
        len(ranks),
        ranks.index(c10d.get_rank()),
        ranks,
        c10d.Backend("rankmesh"),
        torchs._get_default_store(),
        f"rankmesh/{members}/{_splits[members]}",
        pg_options,
        timeout=timeout or default_pg_timeout,
        group_desc=group_desc,
    )
    torchs._world.pg_group_ranks[group] = {global_rank: rank for rank, global_rank in enumerate(ranks)}
    return group


def _rankmesh_group(group: Any) -> ProcessGroup | None:
    """Return a torch group of backend ``rankmesh``, the default group if None; None at ranks that are not members."""
    if group is c10d.GroupMember.NON_GROUP_MEMBER:
        return None
    found = c10d.distributed_c10d._get_default_group() if group is None else group
    if not isinstance(found, ProcessGroup):
        raise TypeError(f"group must be a torch process group of backend 'rankmesh', got one of {found.name()!r}")
    return found


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
