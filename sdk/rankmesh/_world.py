"""The process's groups: init, destroy, new_group, and the questions about them."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from rankmesh_agent.wire.deadline import seconds_of
from rankmesh_agent.wire.settings import Settings

if TYPE_CHECKING:
    from rankmesh._rendezvous import Rendezvous
    from rankmesh_agent.agent import Agent
    from rankmesh_agent.engine.communicator import Communicator

default_pg_timeout: Final = timedelta(minutes=30)
"""Default time an operation may take, as in torch.distributed; RANKMESH_TIMEOUT (seconds) changes it."""

BACKENDS = ("mesh", "gloo")
"""Names that mean the CPU data plane. Scripts written for gloo run unchanged; get_backend() says 'mesh'."""


class ProcessGroup:
    """A group of ranks, this process among them. Made by init_process_group and new_group, not by hand."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._ranks = communicator.ranks

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._communicator.rank

    def size(self) -> int:
        """Return the number of members."""
        return self._communicator.size

    def name(self) -> str:
        """Return the name of the backend, as torch's ProcessGroup does."""
        return "mesh"

    @property
    def group_name(self) -> str:
        """The group's name, the same at all members: ``world`` for the default group."""
        return self._communicator.name

    def __repr__(self) -> str:
        return f"<ProcessGroup {self.group_name!r} rank {self.rank()} of {self.size()}>"


class _NonMember:
    """What new_group returns to ranks that are not in the group; collectives on it do nothing."""

    def __repr__(self) -> str:
        return "GroupMember.NON_GROUP_MEMBER"


class GroupMember:
    """Names for the two groups that are not made by new_group, as in torch.distributed.

    ``GroupMember.NON_GROUP_MEMBER`` is what ``new_group`` returns to a rank that is not a member.
    """

    NON_GROUP_MEMBER: Final = _NonMember()


Group = ProcessGroup | _NonMember | None


class _World:
    """Everything one init_process_group made."""

    def __init__(self, agent: Agent, rendezvous: Rendezvous) -> None:
        self.agent = agent
        self.rendezvous = rendezvous
        self.group = ProcessGroup(agent.world)

    def close(self, reason: str) -> None:
        self.agent.close(reason)
        self.rendezvous.close()

    def forget(self) -> None:
        self.agent.forget()
        self.rendezvous.forget()


_world: _World | None = None
_lock = threading.Lock()


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | float | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    group_name: str = "",
    pg_options: Any = None,
) -> None:
    """Join the job and make the default group; returns when every rank has.

    Args:
        backend: ``"mesh"`` (default) or ``"gloo"``: the CPU data plane for NumPy arrays.
        init_method: where the ranks find each other. All of these end at a gateway's HTTP address:

            * ``"env://"`` (default): MASTER_ADDR and MASTER_PORT; rank 0 hosts the gateway unless the launcher does.
            * ``"tcp://host:port"``: the same, without the environment.
            * ``"file:///path"``: rank 0 writes the address of its gateway to the file; the path must be shared.
            * ``"http://host:port"``: a gateway that runs already.

            ``?rank=…&world_size=…`` may be appended to each.
        timeout: how long the join, and later by default each operation, may take: timedelta or seconds; 30 minutes
            unless RANKMESH_TIMEOUT says otherwise.
        world_size: how many ranks there are; WORLD_SIZE, Slurm's or Open MPI's variables if left out.
        rank: which one this is; RANK, Slurm's or Open MPI's variables if left out.
        store: not supported yet, must be None.
        group_name: keeps several jobs apart at one gateway; RANKMESH_JOB if left out.
        pg_options: accepted and ignored.

    Raises:
        RuntimeError: called twice without destroy_process_group in between.
        ValueError: an argument or environment variable is missing or makes no sense.
        AddressInUseError: rank 0 cannot host the gateway because somebody else listens there.
        GatewayUnreachableError: no gateway answers there.
        JoinTimeoutError: ranks are missing when the timeout is over; names them.
        RankTakenError: another live process has this rank.
        WorldSizeMismatchError: the ranks disagree on the world size.
        AuthenticationError: the token is not the job's.

    Source: https://pytorch.org/docs/2.1/distributed.html#initialization
    """
    global _world
    from rankmesh._rendezvous import rendezvous

    with _lock:
        if _world is not None:
            raise RuntimeError("init_process_group() was called before; call destroy_process_group() first")
        if store is not None:
            raise ValueError("store= is not supported yet; use init_method")
        _check_backend(backend)
        settings = Settings.from_env(os.environ)
        if group_name:
            settings = replace(settings, job=group_name)
        seconds = seconds_of(timeout, settings.timeout)
        meeting = rendezvous(init_method or "env://", rank, world_size, settings)
        try:
            from rankmesh_agent.agent import Agent

            agent = Agent(
                settings,
                meeting.find,
                rank=meeting.rank,
                world_size=meeting.world_size,
                host=meeting.bind_host,
                timeout=seconds,
            )
        except BaseException:
            meeting.close()
            raise
        _world = _World(agent, meeting)
    atexit.register(_leave_at_exit)


def destroy_process_group(group: Group = None) -> None:
    """Leave a group made by new_group, or with no argument the job: connections close, threads end.

    Operations of the group that are under way here fail with an error that says so. Ranks that wait for this one are
    told if it leaves the job; leaving one group is between the members, they find out at their deadline.

    Source: torch.distributed.destroy_process_group
    """
    global _world
    world = _require_world()
    if isinstance(group, _NonMember):
        return
    if group is None or group is world.group:
        with _lock:
            _world = None
        atexit.unregister(_leave_at_exit)
        world.close("")
    else:
        world.agent.drop_group(communicator(group))


def is_initialized() -> bool:
    """Return whether init_process_group has been called."""
    return _world is not None


def is_available() -> bool:
    """Return True: the package has no optional native part."""
    return True


def get_rank(group: Group = None) -> int:
    """Return this process's rank in ``group`` (default: the world), -1 if it is not a member.

    Raises:
        ValueError: init_process_group has not been called.
    """
    return -1 if isinstance(group, _NonMember) else communicator(group).rank


def get_world_size(group: Group = None) -> int:
    """Return the number of ranks in ``group`` (default: the world), -1 if this process is not a member.

    Raises:
        ValueError: init_process_group has not been called.
    """
    return -1 if isinstance(group, _NonMember) else communicator(group).size


def get_backend(group: Group = None) -> str:
    """Return what carries out the group's calls: ``"mesh"``, also when the script asked for ``"gloo"``.

    Raises:
        ValueError: init_process_group has not been called, or this process is not a member.
    """
    if isinstance(group, _NonMember):
        raise ValueError("this process is not a member of the group")
    return "mesh" if communicator(group) else ""


def get_process_group_ranks(group: Group = None) -> list[int]:
    """Return the global ranks of the members, by group rank.

    Raises:
        ValueError: init_process_group has not been called, or this process is not a member.
    """
    if isinstance(group, _NonMember):
        raise ValueError("this process is not a member of the group")
    return list(communicator(group).ranks)


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | float | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
) -> ProcessGroup | _NonMember:
    """Make a group of some ranks. Members wait for each other; other ranks may call it, as torch wants, or not.

    Ranks that are members of several groups with the same members must make these in the same order.

    Args:
        ranks: global ranks of the members, all ranks if None; sorted, they get the group ranks 0, 1, …
        timeout: default time an operation of the group may take; the world's if None.
        backend: as for init_process_group.
        pg_options: accepted and ignored.
        use_local_synchronization: accepted; only members ever synchronize.

    Returns:
        The group, or GroupMember.NON_GROUP_MEMBER at ranks that are not members.

    Raises:
        ValueError: a rank is out of range or given twice.
        DistBackendError: a member did not come in time, or failed.

    Source: https://pytorch.org/docs/2.1/distributed.html#torch.distributed.new_group
    """
    world = _require_world()
    _check_backend(backend)
    size = world.group.size()
    members = list(range(size)) if ranks is None else sorted(int(rank) for rank in ranks)
    if not members:
        raise ValueError("new_group() needs at least one rank")
    if len(set(members)) != len(members):
        raise ValueError(f"new_group() got a rank twice: {members}")
    if members[0] < 0 or members[-1] >= size:
        raise ValueError(f"new_group() got ranks {members}, but the world's ranks are 0 to {size - 1}")
    if world.group.rank() not in members:
        return GroupMember.NON_GROUP_MEMBER
    return ProcessGroup(world.agent.new_group(members, seconds_of(timeout, communicator(None).timeout)))


def communicator(group: ProcessGroup | None) -> Communicator:
    """Return what carries out a group's calls.

    Raises:
        ValueError: init_process_group has not been called.
        TypeError: ``group`` is not a group.
    """
    if group is None:
        if _world is None:
            raise ValueError("the default process group has not been initialized; call init_process_group() first")
        return _world.group._communicator
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup from new_group(), got {type(group).__qualname__}")
    return group._communicator


def _require_world() -> _World:
    if _world is None:
        raise ValueError("the default process group has not been initialized; call init_process_group() first")
    return _world


def _check_backend(backend: str | None) -> None:
    if backend is None:
        return
    for part in str(backend).lower().split(","):
        device, _, name = part.rpartition(":")
        if name not in BACKENDS and device != "cuda":
            raise ValueError(
                f"backend {backend!r} is not available: use {' or '.join(map(repr, BACKENDS))} for NumPy arrays"
            )


def _leave_at_exit() -> None:
    """Say goodbye for a script that ends without destroy_process_group, and tell the others if an error ended it."""
    global _world
    world, _world = _world, None
    if world is not None:
        error = getattr(sys, "last_value", None)  # Python keeps an uncaught exception there
        world.close("" if error is None else f"it ended with {type(error).__name__}: {error}"[:500])


def _forget_after_fork() -> None:
    """A forked child is not a rank: it must not answer, or say goodbye, for its parent."""
    global _world
    world, _world = _world, None
    if world is not None:
        atexit.unregister(_leave_at_exit)
        world.forget()


os.register_at_fork(after_in_child=_forget_after_fork)
