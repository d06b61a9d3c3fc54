"""Questions about a group: ranks, sizes, members and backends."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from rankmesh._session.backend import is_nccl_available
from rankmesh._session.process_group import Group, NonMember, ProcessGroup
from rankmesh._session.session import communicator_of, require_session
from rankmesh_agent.config.settings import Settings


def as_int(number: Any, name: str) -> int:
    """Return an integer; TypeError names any other object."""
    if type(number) is int:
        return number
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise TypeError(f"{name} must be a whole number, got {number!r}")
    return int(number.__index__())


def require_member(group: Group) -> ProcessGroup:
    """Return the group itself, the default group for None; ValueError if this process is not a member."""
    if group is None:
        return require_session().group
    if isinstance(group, NonMember):
        raise ValueError(
            "this process is not a member of the group: make this call only at its members; elsewhere get_rank() is -1"
        )
    communicator_of(group)
    return group


def get_rank(group: Group = None) -> int:
    """Return this process's rank in ``group`` (default: the world), -1 if it is not a member.

    Raises:
        ValueError: init_process_group has not been called.
    """
    return -1 if isinstance(group, NonMember) else communicator_of(group).rank


def get_world_size(group: Group = None) -> int:
    """Return the number of ranks in ``group`` (default: the world), -1 if this process is not a member.

    Raises:
        ValueError: init_process_group has not been called.
    """
    return -1 if isinstance(group, NonMember) else communicator_of(group).size


def get_backend(group: Group = None) -> str:
    """Return the backend of the group's collectives: ``"mesh"``, also when the script asked for ``"gloo"``.

    It is ``"nccl"`` if the script named that alone; see get_backend_config for the backend of arrays on GPUs.

    Raises:
        ValueError: init_process_group has not been called, or this process is not a member.
    """
    return require_member(group)._engines.name


def get_backend_config(group: Group = None) -> str:
    """Return the backends of the group's collectives by device, for example ``"cpu:mesh,cuda:nccl"``.

    For GPUs that is ``nccl``, or the CPU's backend if arrays on GPUs go through host memory.

    Raises:
        ValueError: init_process_group has not been called, or this process is not a member.
    """
    member = require_member(group)
    engines, selection = member._engines, member._communicator.gpus
    device = engines.device if selection is None else selection.backend_name
    if device == "auto":
        device = "nccl" if is_nccl_available() else "host"
    return f"cpu:{engines.host},cuda:{engines.host if device == 'host' else device}"


def set_timeout(timeout: timedelta | float, group: Group = None) -> None:
    """Set the default time that later operations of ``group`` (default: the world) may take, timedelta or seconds.

    Raises:
        ValueError: the timeout is negative; init_process_group has not been called, or this process is not a member.
    """
    require_member(group).set_timeout(timeout)


def get_group_rank(group: Group, global_rank: int) -> int:
    """Return a global rank's rank in ``group``.

    Raises:
        ValueError: it is not a member; or init_process_group has not been called.
    """
    ranks = get_process_group_ranks(group)
    if as_int(global_rank, "global_rank") not in ranks:
        raise ValueError(f"global rank {global_rank} is not in the group, whose ranks are {ranks}")
    return ranks.index(global_rank)


def get_global_rank(group: Group, group_rank: int) -> int:
    """Return the global rank of a rank in ``group``.

    Raises:
        ValueError: the group has no such rank; or init_process_group has not been called.
    """
    ranks = get_process_group_ranks(group)
    if not 0 <= as_int(group_rank, "group_rank") < len(ranks):
        raise ValueError(f"group rank {group_rank} is not in the group, whose ranks are 0 to {len(ranks) - 1}")
    return ranks[group_rank]


def get_process_group_ranks(group: Group = None) -> list[int]:
    """Return the global ranks of the members, by group rank.

    Raises:
        ValueError: init_process_group has not been called, or this process is not a member.
    """
    return list(require_member(group)._communicator.global_ranks)


def get_pg_count() -> int:
    """Return how many groups this process is a member of, the default one included.

    Raises:
        ValueError: init_process_group has not been called.
    """
    return 1 + len(require_session().groups)


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return this process's rank among those of its host: LOCAL_RANK, or the variable of Slurm or Open MPI.

    Args:
        fallback_rank: returned without such a variable.

    Raises:
        RuntimeError: there is no such variable and no fallback.
    """
    local_rank = Settings.from_env(os.environ).local_rank
    if local_rank is not None:
        return local_rank
    if fallback_rank is None:
        raise RuntimeError("LOCAL_RANK is not set: start with 'rankmesh run', or pass fallback_rank")
    return int(fallback_rank)
