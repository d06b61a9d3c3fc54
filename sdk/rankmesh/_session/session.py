"""The process's groups: init, destroy, new_group, and the questions about them."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from rankmesh._session.backend import BackendOptions, Engines, create, resolve
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.net.deadline import seconds_of

if TYPE_CHECKING:
    from rankmesh._rendezvous import Rendezvous
    from rankmesh._stores.agent import AgentStore as Store
    from rankmesh_agent.agent import Agent
    from rankmesh_agent.gpu.selection import GpuBackendSelector
    from rankmesh_agent.group.communicator import Communicator
    from rankmesh_agent.remote.agent import RemoteAgent

default_pg_timeout: Final = timedelta(minutes=30)
"""Default time an operation may take, as in torch.distributed; RANKMESH_TIMEOUT (seconds) changes it."""


class ProcessGroup:
    """A group of ranks, this process among them. Made by init_process_group and new_group, not by hand."""

    def __init__(self, communicator: Communicator, engines: Engines, description: str = "") -> None:
        self._communicator = communicator
        self._engines = engines
        self._description = description
        self._choice: GpuBackendSelector | None = None  # who makes calls on arrays on GPUs, once there were any

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._communicator.rank

    def size(self) -> int:
        """Return the number of members."""
        return self._communicator.size

    def name(self) -> str:
        """Return the name of the backend, as torch's ProcessGroup does."""
        return self._engines.name

    @property
    def group_name(self) -> str:
        """The group's name, the same at all members: ``world`` for the default group."""
        return self._communicator.name

    @property
    def group_desc(self) -> str:
        """What new_group was told the group is for."""
        return self._description or "undefined"

    def __repr__(self) -> str:
        return f"<ProcessGroup {self.group_name!r} rank {self.rank()} of {self.size()}>"


class NonMember:
    """What new_group returns to ranks that are not in the group; collectives on it do nothing."""

    def __repr__(self) -> str:
        return "GroupMember.NON_GROUP_MEMBER"


class _HasWorld(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:  # noqa: N802  # torch's name
        """The default group, None before init_process_group."""
        return None if _world is None else _world.group


class group(metaclass=_HasWorld):  # noqa: N801  # torch's name
    """``group.WORLD`` is the default group, as in torch.distributed."""


class GroupMember(metaclass=_HasWorld):
    """Names for the two groups that are not made by new_group, as in torch.distributed.

    ``GroupMember.NON_GROUP_MEMBER`` is what ``new_group`` returns to a rank that is not a member; ``GroupMember.WORLD``
    is the default group.
    """

    NON_GROUP_MEMBER: Final = NonMember()


Group = ProcessGroup | NonMember | None


class World:
    """Everything one init_process_group made.

    Attributes:
        lent: whether it was joined for torch's sake, and is to end with torch's group.
    """

    lent = False

    def __init__(self, agent: Agent | RemoteAgent, rendezvous: Rendezvous, engines: Engines, pg_options: Any) -> None:
        self.agent = agent
        self.rendezvous = rendezvous
        self.engines = engines
        self.pg_options = pg_options
        self.groups: list[ProcessGroup] = []
        self.group = ProcessGroup(agent.world, engines)
        self._equip(agent.world, engines.host, pg_options)

    def new_group(
        self, ranks: Sequence[int], timeout: float, engines: Engines | None, pg_options: Any, description: str
    ) -> ProcessGroup:
        """Make a group of these ranks of the mesh, this one among them."""
        made = self.agent.new_group(ranks, timeout)
        default = self.group._communicator
        made.global_ranks = tuple(default.ranks.index(rank) for rank in made.ranks)
        engines = engines or self.engines
        self._equip(made, engines.host, pg_options)
        found = ProcessGroup(made, engines, description)
        self.groups.append(found)
        return found

    def drop_group(self, group: ProcessGroup) -> None:
        """End a group at this rank."""
        self.groups = [other for other in self.groups if other is not group]
        if group._choice is not None:
            group._choice.end(in_order=True)
        self.agent.drop_group(group._communicator)

    def shrink_to(self, group: ProcessGroup) -> None:
        """Make a group the default one, which numbers its members anew; all others end."""
        for other in [self.group, *self.groups]:
            if other is not group:
                self.drop_group(other)
        self.groups, self.group = [], group
        group._communicator.global_ranks = tuple(range(group.size()))

    def _equip(self, made: Communicator, backend: str, pg_options: Any) -> None:
        """Have a backend from outside carry out a group's collectives, if it is one."""
        if backend == "mesh":
            return
        if backend == "mpi":
            self._equip_with_mpi(made)
            return
        from rankmesh._stores import PrefixStore

        store = self.store.clone()  # with a timeout of its own
        store.set_timeout(made.timeout)
        try:
            options = BackendOptions(
                PrefixStore(f"group/{made.id:016x}", store),
                made.rank,
                made.size,
                timedelta(seconds=made.timeout),
                made.name,
                list(made.global_ranks),
            )
            made.use_custom_backend(backend, create(backend, options, pg_options))
        except BaseException as error:
            made.abort(error)
            self.agent.drop_group(made)
            raise

    def _equip_with_mpi(self, made: Communicator) -> None:
        from rankmesh._session.debug import DebugLevel, get_debug_level

        try:
            self.agent.use_mpi(made, compares=get_debug_level() is DebugLevel.DETAIL)
        except BaseException as error:
            made.abort(error)
            self.agent.drop_group(made)
            raise

    @cached_property
    def store(self) -> Store:
        """The job's own store."""
        from rankmesh._stores import agent_store

        return agent_store(self.agent)

    def close(self, reason: str) -> None:
        for group in [self.group, *self.groups]:
            if group._choice is not None:
                group._choice.end(in_order=not reason)
        if "store" in vars(self):
            self.store.close()
        self.agent.close(reason)
        self.rendezvous.close()

    def forget(self) -> None:
        self.agent.forget()
        self.rendezvous.forget()


_world: World | None = None
_worlds: list[World] = []
"""All that this process is in: the default one, and those of other process groups of torch's."""
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
    device_id: Any = None,
) -> None:
    """Join the job and make the default group; returns when every rank has.

    Args:
        backend: what carries out the collectives: ``"mesh"`` (default; ``"gloo"`` and ``"tcp"`` mean the same), the
            CPU data plane; ``"mpi"``, a cluster's own MPI, which then says rank, world size and where the gateway is
            (``mpirun -n 4 python script.py``); ``"nccl"``, NCCL for arrays on GPUs and the mesh for others; a name
            given to Backend.register_backend(); or pairs of device and name, as in ``"cpu:gloo,cuda:nccl"``. Left out,
            arrays on GPUs go over NCCL where it can be used; with ``"gloo"`` they go through host memory.
        init_method: where the ranks find each other. All of these end at a gateway's HTTP address:

            * ``"env://"`` (default): MASTER_ADDR and MASTER_PORT; rank 0 hosts the gateway unless the launcher does.
            * ``"tcp://host:port"``: the same, without the environment; if ranks are left out, the first process of
              that host to come hosts the gateway.
            * ``"tcp://239.1.2.3:port"``, any multicast address: one process hosts the gateway, the others find it.
            * ``"file:///path"``: the first process to come hosts the gateway and writes its address to the file; the
              path must be shared.
            * ``"http://host:port"``: a gateway that runs already. If standalone agents are registered there
              (``rankmesh agent``), this process attaches to one, which then carries its rank: the same host's, over
              shared memory, or another one's.

            ``?rank=…&world_size=…`` may be appended to each, and ``?hosting=attached`` or ``?hosting=embedded`` to
            insist on an agent of a process of its own, or on one in this process; RANKMESH_HOSTING does so for all
            methods. Not together with ``store``.
        timeout: how long the join, and later by default each operation, may take: timedelta or seconds; 30 minutes
            unless RANKMESH_TIMEOUT says otherwise.
        world_size: how many ranks there are; WORLD_SIZE, or a launcher's variables (Slurm, MPI) if left out.
        rank: which one this is; RANK, or a launcher's variables if left out. Where they do not say either, it is given
            one, but for ``env://`` and a store: the lowest that nobody comes with.
        store: a Store that all ranks share, through which they find each other instead; needs ``rank`` and
            ``world_size``.
        group_name: keeps several jobs apart at one address, gateway or file; RANKMESH_JOB if left out.
        pg_options: passed to the creator of a backend registered with ``extended_api``; ignored otherwise.
        device_id: accepted for torch's sake and ignored: arrays say which GPU they are on.

    Raises:
        ValueError: called twice without destroy_process_group in between; an argument or environment variable is
            missing or makes no sense.
        DistBackendError: the backend cannot be used here; says why, and which can.
        AddressInUseError: rank 0 cannot host the gateway because somebody else listens there.
        GatewayUnreachableError: no gateway answers there.
        JoinTimeoutError: ranks are missing when the timeout is over; names them.
        RankTakenError: another live process has this rank.
        WorldSizeMismatchError: the ranks disagree on the world size.
        AuthenticationError: the token is not the job's.
        DistNetworkError: this process is to attach to a standalone agent, and none is registered, free or reachable;
            says who has them.

    Source: https://pytorch.org/docs/2.1/distributed.html#initialization
    """
    global _world
    from rankmesh._rendezvous import rendezvous

    with _lock:
        if _world is not None:
            raise ValueError("init_process_group() was called before; call destroy_process_group() first")
        engines = resolve(backend)
        settings = Settings.from_env(os.environ)
        if group_name:
            settings = replace(settings, job=group_name)
        seconds = seconds_of(timeout, settings.timeout)
        if engines.host == "mpi":
            from rankmesh._rendezvous.mpi import among_mpi

            meeting, settings = among_mpi(init_method, rank, world_size, settings, store=store, timeout=seconds)
        else:
            meeting = rendezvous(init_method, rank, world_size, settings, store=store, timeout=seconds)
        world = join(meeting, settings, seconds, engines, pg_options)
        _world = world


def join(
    meeting: Rendezvous, settings: Settings, timeout: float, engines: Engines | None = None, pg_options: Any = None
) -> World:
    """Join the job; what was hosted for it ends if that fails. The world is left when the process ends.

    Args:
        meeting: where and as whom to join.
        settings: what the environment says.
        timeout: seconds for the join, and the default for calls.
        engines: what carries out the collectives, from ``resolve``; the default ones if left out.
        pg_options: what its creator gets.
    """
    from rankmesh._session.agents import agent_for

    settings = replace(settings, job=meeting.job)
    engines = engines or Engines()
    try:
        agent = agent_for(meeting, settings, timeout)
    except BaseException:
        meeting.close()
        raise
    try:
        world = World(agent, meeting, engines, pg_options)
    except BaseException as error:
        agent.close(f"its backend {engines.host!r} could not be made: {type(error).__name__}: {error}"[:500])
        meeting.close()
        raise
    if not _worlds:
        atexit.register(leave_at_exit)
    _worlds.append(world)
    return world


def adopt(world: World) -> None:
    """Make a world the default one, unless there is one."""
    global _world
    with _lock:
        _world = _world or world


def leave(world: World) -> None:
    """Leave a job. Does nothing if this process is not in it any more."""
    global _world
    with _lock:
        if world not in _worlds:
            return
        if world is _world:
            _world = None
        _worlds.remove(world)
        if not _worlds:
            atexit.unregister(leave_at_exit)
    world.close("")


def destroy_process_group(group: Group = None) -> None:
    """Leave a group made by new_group, or with no argument the job: connections close, threads end.

    Operations of the group that are under way here fail with an error that says so. Ranks that wait for this one are
    told if it leaves the job; leaving one group is between the members, they find out at their deadline.

    Source: torch.distributed.destroy_process_group
    """
    if isinstance(group, NonMember):
        return
    world = require_world()
    if group is None or group is world.group:
        leave(world)
    else:
        communicator(group)  # says what is wrong with it, if anything
        world.drop_group(group)


def current() -> World | None:
    """Return what init_process_group made, None before."""
    return _world


def is_initialized() -> bool:
    """Return whether init_process_group has been called."""
    return _world is not None


def get_default_store() -> Store:
    """Return the job's own store: the keys that every agent serves under ``/v1/store``.

    Raises:
        ValueError: init_process_group has not been called.

    Source: torch.distributed.distributed_c10d._get_default_store
    """
    return require_world().store


_get_default_store = get_default_store
"""torch's name."""


def finish_on_gpus(group: Group, timeout: float) -> None:
    """Wait, at most so many seconds, until the GPUs have carried out a group's calls on them, if there were any.

    Raises:
        DistError: one of them failed.
    """
    found = require_world().group if group is None else group
    if isinstance(found, ProcessGroup) and found._choice is not None:
        found._choice.finish(timeout)


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


def require_world() -> World:
    """Return what init_process_group made.

    Raises:
        ValueError: it has not been called.
    """
    if _world is None:
        raise ValueError("the default process group has not been initialized; call init_process_group() first")
    return _world


def leave_at_exit() -> None:
    """Say goodbye for a script that ends without destroy_process_group, and tell the others if an error ended it.

    Does nothing the second time.
    """
    error = getattr(sys, "last_value", None)  # Python keeps an uncaught exception there
    for world in _gone():
        world.close("" if error is None else f"it ended with {type(error).__name__}: {error}"[:500])


def _forget_after_fork() -> None:
    """A forked child is not a rank: it must not answer, or say goodbye, for its parent."""
    atexit.unregister(leave_at_exit)
    for world in _gone():
        world.forget()
        # For good, the child's end included: to let go of what uses a GPU would be a call to CUDA, which a child that
        # was forked must not make.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(world))


def _gone() -> list[World]:
    """Be in no world any more; return those this process was in."""
    global _world, _worlds
    worlds, _worlds, _world = _worlds, [], None
    return worlds


os.register_at_fork(after_in_child=_forget_after_fork)
