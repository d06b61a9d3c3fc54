"""init_process_group, destroy_process_group and the default group."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from rankmesh._session import session as sessions
from rankmesh._session.backend import check_growth, resolve
from rankmesh._session.process_group import NON_MEMBER, Group, NonMember, ProcessGroup
from rankmesh._session.session import communicator_of, current, leave, require_session
from rankmesh_agent.config.launched import elsewhere, is_launchers
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.net.deadline import seconds_of
from rankmesh_agent.net.descriptors import convert_emfile
from rankmesh_agent.net.greenlets import refuse_greenlets

if TYPE_CHECKING:
    from rankmesh._stores.commands import AgentStore as Store

default_pg_timeout: Final = timedelta(minutes=30)
"""Default time an operation may take, as in torch.distributed; RANKMESH_TIMEOUT (seconds) changes it."""


class _DefaultGroup(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:  # noqa: N802  # torch's name
        """The default group, None before init_process_group."""
        session = current()
        return None if session is None else session.group


class group(metaclass=_DefaultGroup):  # noqa: N801  # torch's name
    """``group.WORLD`` is the default group, as in torch.distributed."""


class GroupMember(metaclass=_DefaultGroup):
    """Names for the two groups that are not made by new_group, as in torch.distributed.

    ``GroupMember.NON_GROUP_MEMBER`` is the value of ``new_group`` on ranks outside the group; ``GroupMember.WORLD`` is
    the default group.
    """

    NON_GROUP_MEMBER: Final = NON_MEMBER


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
    join: bool | None = None,
) -> None:
    """Join the job and make the default group; returns when every rank has joined.

    While it waits, one rank of each host logs a warning every 10 seconds: which ranks (and, with a launcher, nodes) are
    missing and which have joined, or that the gateway does not answer. A KeyboardInterrupt during the wait has the
    seconds waited as its text.

    Args:
        backend: the backend of the collectives: ``"mesh"`` (default; ``"gloo"`` and ``"tcp"`` mean the same), the CPU
            data plane; ``"mpi"``, a cluster's own MPI, which also determines rank, world size and the gateway's
            address (``mpirun -n 4 python script.py``); ``"nccl"``, NCCL for arrays on GPUs and the mesh for others; a
            name given to Backend.register_backend(); or pairs of device and name, as in ``"cpu:gloo,cuda:nccl"``. If
            left out, arrays on GPUs go over NCCL where it can be used; with ``"gloo"`` they go through host memory.
        init_method: URL of the rendezvous. All of these end at a gateway's HTTP address:

            * ``"env://"`` (default): MASTER_ADDR and MASTER_PORT; rank 0 hosts the gateway unless the launcher does.
            * ``"tcp://host:port"``: the same, without the environment; if ranks are left out, the first process on
              that host hosts the gateway.
            * ``"tcp://239.1.2.3:port"``, any multicast address: one process hosts the gateway, the others find it.
            * ``"file:///path"``: the first process hosts the gateway and writes its address to the file; the path must
              be shared.
            * ``"http://host:port"``: a running gateway. If standalone agents are registered there
              (``rankmesh agent``), this process attaches to one, which then carries its rank: one on the same host,
              over shared memory, or one on another host.

            ``?rank=…&world_size=…`` may be appended to each, and ``?hosting=attached`` or ``?hosting=embedded`` to
            require an agent in a process of its own, or one in this process; RANKMESH_HOSTING does so for all
            methods. Not together with ``store``.
        timeout: limit for the join, and by default for each operation and each call of the job's store: timedelta or
            seconds; 30 minutes unless RANKMESH_TIMEOUT is set.
        world_size: number of ranks; WORLD_SIZE, or a launcher's variables (Slurm, MPI) if left out.
        rank: this process's rank; RANK, or a launcher's variables if left out. If no rank is given, the gateway
            assigns the lowest free one (except with ``env://`` and ``store=``, which require it).
        store: a Store that all ranks share, through which they find each other instead; needs ``rank`` and
            ``world_size``.
        group_name: name of the job, for several jobs at one address, gateway or file; RANKMESH_JOB if left out.
        pg_options: passed to the creator of a backend registered with ``extended_api``; ignored otherwise.
        device_id: accepted for compatibility with torch and ignored: each array is on a known GPU.
        join: whether to join a job that runs: returns when its ranks call grow_group(), which makes room for this
            process. Rank and world size are those of the larger world then, and need not be given. By default what
            RANKMESH_JOIN says, which ``rankmesh run --replace`` sets for a process that it starts in place of one that
            was lost.

    Raises:
        ValueError: called twice without destroy_process_group in between; an argument or environment variable is
            missing or invalid; ``join=True`` together with a rank, a world size, a store or MPI.
        DistBackendError: the backend cannot be used here; names the reason and the available backends; or gevent or
            eventlet has made this process's threads greenlets.
        AddressInUseError: rank 0 cannot host the gateway because another process listens there.
        GatewayUnreachableError: no gateway answers there.
        JoinTimeoutError: ranks are missing when the timeout expires; names them. With ``join=True``: the job's ranks
            have not called grow_group().
        JobEndedError: with ``join=True``: all ranks of the job have left.
        RankTakenError: another live process has this rank.
        WorldSizeMismatchError: the ranks disagree on the world size.
        AuthenticationError: the token is not the job's.
        DistNetworkError: this process has to attach to a standalone agent, and none is registered, free or reachable;
            names the processes that hold them.

    Source: https://pytorch.org/docs/2.1/distributed.html#initialization
    """
    with sessions.lock, convert_emfile("this rank cannot join the job"):
        from rankmesh._rendezvous import resolve_init_method

        if current() is not None:
            raise ValueError("init_process_group() was called before; call destroy_process_group() first")
        refuse_greenlets()
        engines = resolve(backend)
        settings = Settings.from_env(_counting(init_method, rank, world_size, store))
        if group_name:
            settings = replace(settings, job=group_name)
        seconds = seconds_of(timeout, settings.timeout)
        if settings.join if join is None else join:
            from rankmesh._rendezvous import resolve_late_join

            check_growth(engines)
            found = resolve_late_join(init_method, rank, world_size, settings, store=store)
        elif engines.host == "mpi":
            from rankmesh._rendezvous.mpi import mpi_rendezvous

            found, settings = mpi_rendezvous(init_method, rank, world_size, settings, store=store, timeout=seconds)
        else:
            found = resolve_init_method(init_method, rank, world_size, settings, store=store, timeout=seconds)
        sessions.adopt(sessions.join(found, settings, seconds, engines, pg_options))


def _counting(init_method: Any, rank: int, world_size: int, store: Any) -> Mapping[str, str]:
    """Return the environment that counts: not the launcher's of a job that the caller describes, at its own address."""
    url = urlsplit(init_method) if isinstance(init_method, str) else None
    with contextlib.suppress(ValueError):  # an invalid port, which the resolution reports
        if url is not None and url.port is not None and is_launchers(os.environ, url.hostname or "", url.port):
            return os.environ
    given = rank >= 0 or world_size >= 0 or (url is not None and "rank=" in url.query)
    own = store is not None or (given and url is not None and url.scheme != "env")
    return elsewhere(os.environ, named=True) if own else os.environ


def destroy_process_group(group: Group = None) -> None:
    """Leave a group made by new_group, or with no argument the job: connections close, threads end.

    Operations of the group that are under way here fail with an error that names this call. Ranks that wait for this
    one, in the group or if it leaves the job in any, get an error that names it.
    """
    if isinstance(group, NonMember):
        return
    session = require_session()
    if group is None or group is session.group:
        leave(session)
    else:
        communicator_of(group)  # raises if it is not a group
        session.drop_group(group)


def is_initialized() -> bool:
    """Return whether init_process_group has been called."""
    return current() is not None


def get_default_store() -> Store:
    """Return the job's own store: the keys that every agent serves under ``/v1/store``.

    Its timeout is the default group's, from init_process_group. A call that waits for keys or for a queue when a rank
    of the default group fails, or the group is aborted, raises RankFailedError, which names the rank and the keys; one
    that is made afterwards waits, so that the ranks that are left can coordinate. Once every other rank has failed or
    left, calls that would wait raise StoreTimeoutError at once.

    Raises:
        ValueError: init_process_group has not been called.

    Source: torch.distributed.distributed_c10d._get_default_store
    """
    return require_session().store


_get_default_store = get_default_store
"""torch's name."""
