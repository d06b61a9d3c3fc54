"""Making, splitting and shrinking groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from rankmesh._session.backend import Engines, resolve
from rankmesh._session.process_group import NON_MEMBER, Group, NonMember, ProcessGroup
from rankmesh._session.ranks import as_int, get_process_group_ranks, get_rank, get_world_size, require_member
from rankmesh._session.session import communicator_of, require_session
from rankmesh_agent.net.deadline import seconds_of

SHRINK_DEFAULT = 0
"""shrink_group waits for nothing."""
SHRINK_ABORT = 1
"""shrink_group ends the operations of the old group that are under way."""


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
    """Make a group of some ranks. Members wait for each other; other ranks may call it, as torch requires, or not.

    Ranks that are members of several groups with the same members must make these in the same order. Calls that failed
    count: a member that did not make one of them gets the others' error from its next call.

    Args:
        ranks: global ranks of the members, all ranks if None.
        timeout: default time an operation of the group may take; the world's if None.
        backend: as for init_process_group; the world's if None.
        pg_options: as for init_process_group.
        use_local_synchronization: accepted; only members ever synchronize.
        group_desc: a description, for ``ProcessGroup.group_desc``.
        device_id: accepted for compatibility with torch and ignored.
        sort_ranks: give the group ranks 0, 1, … in the order of global ranks; else in the order of ``ranks``.

    Returns:
        The group, or GroupMember.NON_GROUP_MEMBER on ranks outside the group.

    Raises:
        ValueError: a rank is out of range or given twice; the timeout is negative; the backend is not known.
        DistBackendError: a member did not make the call in time, or failed.
    """
    engines = None if backend is None else resolve(backend)
    return _new_group(ranks, timeout, engines, pg_options, group_desc, sort_ranks=sort_ranks)


def _new_group(
    ranks: Sequence[int] | None,
    timeout: timedelta | float | None,
    engines: Engines | None,
    pg_options: Any,
    group_desc: str | None,
    *,
    sort_ranks: bool,
) -> ProcessGroup | NonMember:
    world = communicator_of(None)
    seconds = seconds_of(timeout, world.timeout)
    members = list(range(world.size)) if ranks is None else check_ranks(ranks, "ranks", world.size, "the world's ranks")
    if sort_ranks:
        members.sort()
    if world.rank not in members:
        return NON_MEMBER
    chosen = [world.ranks[rank] for rank in members]
    return require_session().new_group(chosen, seconds, engines, pg_options, group_desc or "")


def new_subgroups(
    group_size: int | None = None,
    group: Group = None,
    timeout: timedelta | float | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup, list[ProcessGroup | NonMember]]:
    """Split a group into subgroups of ``group_size`` consecutive ranks.

    Args:
        group_size: ranks in each subgroup; by default the number of ranks on this host, the same on every host.
        group: the group to split, the world by default.

    The other arguments are those of new_group.

    Returns:
        This rank's subgroup, and all of them (NON_GROUP_MEMBER for those of others).

    Raises:
        ValueError: the group cannot be split into subgroups of this size; or this process is not a member.
        Exception: as for new_group.
    """
    ranks = get_process_group_ranks(require_member(group))
    size = _ranks_on_this_host(group) if group_size is None else as_int(group_size, "group_size")
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
    """Make several disjoint groups.

    Args:
        ranks_per_subgroup_list: the global ranks of each.

    The other arguments are those of new_group.

    Returns:
        This rank's subgroup, None if it is in none; and all of them (NON_GROUP_MEMBER for those of others).

    Raises:
        ValueError: there is no list, one is empty, or a rank is in two or out of range; no group has been made then.
        Exception: as for new_group.
    """
    split = check_split(ranks_per_subgroup_list, "ranks_per_subgroup_list", get_world_size(), "the world's ranks")
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

    The other arguments are those of new_group; without ``timeout`` and ``backend`` the parent's are taken.

    Returns:
        The group this rank is in, None if it is in none.

    Raises:
        ValueError: there is no list, one is empty, a rank is in two or out of range, or this process is not in
            ``parent_pg``.
        Exception: as for new_group.
    """
    member = require_member(parent_pg)
    parent = get_process_group_ranks(member)
    split = check_split(split_ranks, "split_ranks", len(parent), "the ranks of parent_pg")
    me = get_rank(parent_pg)
    mine = next((ranks for ranks in split if me in ranks), None)
    if mine is None:
        return None
    limit = seconds_of(timeout, member._communicator.timeout)
    engines = member._engines if backend is None else resolve(backend)
    ranks = [parent[rank] for rank in sorted(mine)]
    group = _new_group(ranks, limit, engines, pg_options, group_desc, sort_ranks=False)
    assert isinstance(group, ProcessGroup)
    return group


def shrink_group(
    ranks_to_exclude: Sequence[int], group: Group = None, shrink_flags: int = SHRINK_DEFAULT, pg_options: Any = None
) -> ProcessGroup:
    """Make a group of a group's members without those excluded, for example failed ones, which do not call it.

    If ``group`` is the default group, the new one becomes the default group: its members get new ranks, 0, 1, …, in the
    old order, and all other groups end.

    The groups that end do so first: a remaining member that waits for this rank in one of them gets the first failure
    that this rank knows, or if there was none, an error that names this rank and this call. They have ended, too, if
    the new group cannot be made; the call can be repeated then.

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
        DistBackendError: a remaining member did not make the call in time, or failed.
    """
    if not isinstance(ranks_to_exclude, list | tuple):
        raise TypeError(f"ranks_to_exclude must be a list of ranks, got {ranks_to_exclude!r}")
    if shrink_flags not in (SHRINK_DEFAULT, SHRINK_ABORT):
        raise ValueError(f"shrink_flags={shrink_flags!r} is neither SHRINK_DEFAULT (0) nor SHRINK_ABORT (1)")
    old = require_member(group)
    out = check_ranks(ranks_to_exclude, "ranks_to_exclude", old.size(), "the group's ranks")
    if old.rank() in out:
        raise RuntimeError(f"rank {old.rank()} cannot exclude itself: only the others call shrink_group()")
    session, comm = require_session(), old._communicator
    remaining = [rank for number, rank in enumerate(comm.ranks) if number not in out]
    return session.shrink(old, remaining, out, pg_options)


def check_ranks(ranks: Any, name: str, size: int, of: str) -> list[int]:
    """Return an argument as a list of ranks."""
    try:
        found = [as_int(rank, f"a rank of {name}") for rank in iter(ranks)]
    except TypeError as error:
        raise TypeError(f"{name} must be a list of ranks, got {ranks!r}") from error
    if not found:
        raise ValueError(f"{name} must have at least one rank")
    if len(set(found)) != len(found):
        raise ValueError(f"{name} has a rank twice: {found}")
    if min(found) < 0 or max(found) >= size:
        raise ValueError(f"{name}={found}, but {of} are 0 to {size - 1}")
    return found


def check_split(split: Any, name: str, size: int, of: str) -> list[list[int]]:
    """Return lists of ranks that have none in common; see _checked."""
    if not isinstance(split, list | tuple) or not split:
        raise ValueError(f"{name} must be a list of at least one list of ranks, got {split!r}")
    found = [check_ranks(ranks, f"{name}[{number}]", size, of) for number, ranks in enumerate(split)]
    counts = Counter(rank for ranks in found for rank in ranks)
    twice = [rank for rank, count in counts.items() if count > 1]
    if twice:
        raise ValueError(f"{name} has rank {twice[0]} in two groups: {found}")
    return found


def _ranks_on_this_host(group: Group) -> int:
    session = require_session()
    ranks = Counter(session.agent.members[rank].host_id for rank in require_member(group)._communicator.ranks)
    if len(set(ranks.values())) > 1:
        raise ValueError(f"the hosts have {sorted(ranks.values())} ranks of the group: give group_size")
    return next(iter(ranks.values()))
