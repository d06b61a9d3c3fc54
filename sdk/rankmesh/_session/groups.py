"""Groups: making them, splitting and shrinking them, and the questions about them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from rankmesh._collectives.arguments import whole
from rankmesh._session.backend import Backend, Engines, is_nccl_available, resolve
from rankmesh._session.session import Group, GroupMember, NonMember, ProcessGroup, communicator, require_world
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.net.deadline import seconds_of

SHRINK_DEFAULT = 0
"""shrink_group waits for nothing."""
SHRINK_ABORT = 1
"""shrink_group ends the operations of the old group that are under way."""


def get_rank(group: Group = None) -> int:
    """Return this process's rank in ``group`` (default: the world), -1 if it is not a member.

    Raises:
        ValueError: init_process_group has not been called.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.get_rank
    """
    return -1 if isinstance(group, NonMember) else communicator(group).rank


def get_world_size(group: Group = None) -> int:
    """Return the number of ranks in ``group`` (default: the world), -1 if this process is not a member.

    Raises:
        ValueError: init_process_group has not been called.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.get_world_size
    """
    return -1 if isinstance(group, NonMember) else communicator(group).size


def get_backend(group: Group = None) -> Backend:
    """Return what carries out the group's collectives: ``"mesh"``, also when the script asked for ``"gloo"``.

    ``"nccl"`` if the script named nothing else; what carries out those on arrays on GPUs: see get_backend_config.

    Raises:
        ValueError: init_process_group has not been called, or this process is not a member.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.get_backend
    """
    return Backend(_member(group)._engines.name)


def get_backend_config(group: Group = None) -> str:
    """Return what carries out the group's collectives, by device: ``"cpu:mesh,cuda:nccl"``, for example.

    For GPUs that is ``nccl``; ``cuda-ipc`` once ranks that share one have met; or what it is for the CPU, where arrays
    on GPUs go through host memory.

    Raises:
        ValueError: init_process_group has not been called, or this process is not a member.

    Source: torch.distributed.get_backend_config
    """
    member = _member(group)
    engines, choice = member._engines, member._choice
    device = engines.device if choice is None else choice.backend_name
    if device == "auto":
        device = "nccl" if is_nccl_available() else "host"
    return f"cpu:{engines.host},cuda:{engines.host if device == 'host' else device}"


def get_group_rank(group: Group, global_rank: int) -> int:
    """Return a global rank's rank in ``group``.

    Raises:
        ValueError: it is not a member, nor is this process; or init_process_group has not been called.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.get_group_rank
    """
    ranks = get_process_group_ranks(group)
    if whole(global_rank, "global_rank") not in ranks:
        raise ValueError(f"global rank {global_rank} is not in the group, whose ranks are {ranks}")
    return ranks.index(global_rank)


def get_global_rank(group: Group, group_rank: int) -> int:
    """Return the global rank of a rank in ``group``.

    Raises:
        ValueError: the group has no such rank, or this process is not a member; or init_process_group has not been
            called.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.get_global_rank
    """
    ranks = get_process_group_ranks(group)
    if not 0 <= whole(group_rank, "group_rank") < len(ranks):
        raise ValueError(f"group rank {group_rank} is not in the group, whose ranks are 0 to {len(ranks) - 1}")
    return ranks[group_rank]


def get_process_group_ranks(group: Group = None) -> list[int]:
    """Return the global ranks of the members, by group rank.

    Raises:
        ValueError: init_process_group has not been called, or this process is not a member.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.get_process_group_ranks
    """
    return list(_member(group)._communicator.global_ranks)


def get_pg_count() -> int:
    """Return how many groups this process is a member of, the default one included.

    Raises:
        ValueError: init_process_group has not been called.

    Source: torch.distributed.get_pg_count
    """
    return 1 + len(require_world().groups)


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return this process's number among those of its host: LOCAL_RANK, Slurm's or Open MPI's variable.

    Args:
        fallback_rank: what to return without such a variable.

    Raises:
        RuntimeError: there is no such variable and no fallback.

    Source: torch.distributed.get_node_local_rank
    """
    local_rank = Settings.from_env(os.environ).local_rank
    if local_rank is not None:
        return local_rank
    if fallback_rank is None:
        raise RuntimeError("LOCAL_RANK is not set: start with 'rankmesh run', or pass fallback_rank")
    return int(fallback_rank)


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | float | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: Any = None,
    sort_ranks: bool = True,
) -> ProcessGroup | NonMember:
    """Make a group of some ranks. Members wait for each other; other ranks may call it, as torch wants, or not.

    Ranks that are members of several groups with the same members must make these in the same order.

    Args:
        ranks: global ranks of the members, all ranks if None.
        timeout: default time an operation of the group may take; the world's if None.
        backend: as for init_process_group; the world's if None.
        pg_options: as for init_process_group.
        use_local_synchronization: accepted; only members ever synchronize.
        group_desc: what the group is for, for ``ProcessGroup.group_desc``.
        device_id: accepted for torch's sake and ignored.
        sort_ranks: give the group ranks 0, 1, … in the order of global ranks; else in the order of ``ranks``.

    Returns:
        The group, or GroupMember.NON_GROUP_MEMBER at ranks that are not members.

    Raises:
        ValueError: a rank is out of range or given twice; the timeout is negative; the backend is not known.
        DistBackendError: a member did not come in time, or failed.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.new_group
    """
    engines = None if backend is None else resolve(backend)
    return _made(ranks, timeout, engines, pg_options, group_desc, sort_ranks=sort_ranks)


def _made(
    ranks: Sequence[int] | None,
    timeout: timedelta | float | None,
    engines: Engines | None,
    pg_options: Any,
    group_desc: str | None,
    *,
    sort_ranks: bool,
) -> ProcessGroup | NonMember:
    world = require_world()
    seconds = seconds_of(timeout, communicator(None).timeout)
    size = world.group.size()
    wanted = list(range(size)) if ranks is None else _checked(ranks, "ranks", size, "the world's ranks")
    if world.group.rank() not in wanted:
        return GroupMember.NON_GROUP_MEMBER
    mesh_ranks = communicator(None).ranks
    members = [mesh_ranks[rank] for rank in (sorted(wanted) if sort_ranks else wanted)]
    return world.new_group(members, seconds, engines, pg_options, group_desc or "")


def new_subgroups(
    group_size: int | None = None,
    group: Group = None,
    timeout: timedelta | float | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup, list[ProcessGroup | NonMember]]:
    """Split a group into neighbouring ranks, ``group_size`` each.

    Args:
        group_size: ranks in each subgroup; by default the ranks that this host has, as many as every host.
        group: the group to split, the world by default.
        timeout, backend, pg_options, group_desc: as for new_group.

    Returns:
        This rank's subgroup, and all of them (NON_GROUP_MEMBER for those of others).

    Raises:
        ValueError: the group cannot be split into subgroups of this size; or this process is not a member.
        As new_group.

    Source: torch.distributed.new_subgroups
    """
    ranks = get_process_group_ranks(group)
    size = _ranks_on_this_host(group) if group_size is None else whole(group_size, "group_size")
    if size < 1 or len(ranks) % size:
        raise ValueError(f"group_size={size} does not divide the group's {len(ranks)} ranks")
    split = [ranks[begin : begin + size] for begin in range(0, len(ranks), size)]
    mine, groups = new_subgroups_by_enumeration(split, timeout, backend, pg_options, group_desc)
    assert mine is not None
    return mine, groups


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: timedelta | float | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup | None, list[ProcessGroup | NonMember]]:
    """Make several groups that have no rank in common.

    Args:
        ranks_per_subgroup_list: the global ranks of each.
        timeout, backend, pg_options, group_desc: as for new_group.

    Returns:
        This rank's subgroup, None if it is in none; and all of them (NON_GROUP_MEMBER for those of others).

    Raises:
        ValueError: there is none, one is empty, or a rank is in two or out of range; nothing has been made then.
        As new_group.

    Source: torch.distributed.new_subgroups_by_enumeration
    """
    split = checked_split(ranks_per_subgroup_list, "ranks_per_subgroup_list", get_world_size(), "the world's ranks")
    groups = [new_group(ranks, timeout, backend, pg_options, group_desc=group_desc) for ranks in split]
    return next((made for made in groups if isinstance(made, ProcessGroup)), None), groups


def split_group(
    parent_pg: Group = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | float | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> ProcessGroup | None:
    """Make groups out of a group's members; each member calls it and gets the one it is in.

    Args:
        parent_pg: the group, the world by default.
        split_ranks: the ranks of each new group, numbered as in ``parent_pg``; the new ranks are in their order there.
        timeout: default time an operation of the new group may take; the parent's if None.
        pg_options, backend, group_desc: as for new_group; the parent's backend if None.

    Returns:
        The group this rank is in, None if it is in none.

    Raises:
        ValueError: there is none, one is empty, a rank is in two or out of range, or this process is not in
            ``parent_pg``.
        As new_group.

    Source: torch.distributed.split_group
    """
    parent = get_process_group_ranks(parent_pg)
    split = checked_split(split_ranks, "split_ranks", len(parent), "the ranks of parent_pg")
    me = get_rank(parent_pg)
    mine = next((ranks for ranks in split if me in ranks), None)
    if mine is None:
        return None
    limit = seconds_of(timeout, _member(parent_pg)._communicator.timeout)
    engines = _member(parent_pg)._engines if backend is None else resolve(backend)
    ranks = [parent[rank] for rank in sorted(mine)]
    made = _made(ranks, limit, engines, pg_options, group_desc, sort_ranks=False)
    assert isinstance(made, ProcessGroup)
    return made


def shrink_group(
    ranks_to_exclude: Sequence[int], group: Group = None, shrink_flags: int = SHRINK_DEFAULT, pg_options: Any = None
) -> ProcessGroup:
    """Make a group of a group's other members, without those excluded: failed ones, say. These do not call it.

    If ``group`` is the default group, the new one becomes the default group: its members get new ranks, 0, 1, …, in the
    old order, and all other groups end.

    Args:
        ranks_to_exclude: ranks in ``group``.
        group: the group, the world by default; ends at this rank.
        shrink_flags: SHRINK_DEFAULT or SHRINK_ABORT; operations of ``group`` that are under way fail either way.
        pg_options: as for new_group.

    Returns:
        The new group.

    Raises:
        TypeError: ``ranks_to_exclude`` is no list.
        ValueError: it is empty, or names a rank twice or out of range; or the flags are not known.
        RuntimeError: it names this rank.
        DistBackendError: a remaining member did not come in time, or failed.

    Source: torch.distributed.shrink_group
    """
    if not isinstance(ranks_to_exclude, list | tuple):
        raise TypeError(f"ranks_to_exclude must be a list of ranks, got {ranks_to_exclude!r}")
    if shrink_flags not in (SHRINK_DEFAULT, SHRINK_ABORT):
        raise ValueError(f"shrink_flags={shrink_flags!r} is neither SHRINK_DEFAULT (0) nor SHRINK_ABORT (1)")
    old = _member(group)
    out = _checked(ranks_to_exclude, "ranks_to_exclude", old.size(), "the group's ranks")
    if old.rank() in out:
        raise RuntimeError(f"rank {old.rank()} cannot exclude itself: only the others call shrink_group()")
    world = require_world()
    comm = old._communicator
    remaining = [rank for number, rank in enumerate(comm.ranks) if number not in out]
    made = world.new_group(remaining, comm.timeout, old._engines, pg_options, old._description)
    if old is world.group:
        world.shrink_to(made)
    else:
        world.drop_group(old)
    return made


def _member(group: Group) -> ProcessGroup:
    """Return the group.

    Raises:
        ValueError: this process is not a member, or init_process_group has not been called.
    """
    if isinstance(group, NonMember):
        raise ValueError("this process is not a member of the group")
    communicator(group)
    return require_world().group if group is None else group


def _checked(ranks: Any, name: str, size: int, of: str) -> list[int]:
    """Return a list of ranks.

    Args:
        ranks: what the user passed.
        name: the argument's name.
        size: how many ranks there are.
        of: which those are, in words.

    Raises:
        TypeError: it is no list of whole numbers.
        ValueError: it is empty, or has a rank twice or out of range.
    """
    try:
        found = [whole(rank, f"a rank of {name}") for rank in iter(ranks)]
    except TypeError as error:
        raise TypeError(f"{name} must be a list of ranks, got {ranks!r}") from error
    if not found:
        raise ValueError(f"{name} must have at least one rank")
    if len(set(found)) != len(found):
        raise ValueError(f"{name} has a rank twice: {found}")
    if min(found) < 0 or max(found) >= size:
        raise ValueError(f"{name}={found}, but {of} are 0 to {size - 1}")
    return found


def checked_split(split: Any, name: str, size: int, of: str) -> list[list[int]]:
    """Return lists of ranks that have none in common; see _checked."""
    if not isinstance(split, list | tuple) or not split:
        raise ValueError(f"{name} must be a list of at least one list of ranks, got {split!r}")
    found = [_checked(ranks, f"{name}[{number}]", size, of) for number, ranks in enumerate(split)]
    counts = Counter(rank for ranks in found for rank in ranks)
    twice = [rank for rank, count in counts.items() if count > 1]
    if twice:
        raise ValueError(f"{name} has rank {twice[0]} in two groups: {found}")
    return found


def _ranks_on_this_host(group: Group) -> int:
    world = require_world()
    ranks = Counter(world.agent.host_of(rank) for rank in _member(group)._communicator.ranks)
    if len(set(ranks.values())) > 1:
        raise ValueError(f"the hosts have {sorted(ranks.values())} ranks of the group: give group_size")
    return next(iter(ranks.values()))
