"""The init methods: what the URL, the arguments and the environment say, put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal, NamedTuple
from urllib.parse import SplitResult, urlsplit

from rankmesh._rendezvous import handlers
from rankmesh._rendezvous.file import AtFile
from rankmesh._rendezvous.launcher_env import placed
from rankmesh._rendezvous.locator import LOOPBACK, Known, Meeting
from rankmesh._rendezvous.multicast import AtMulticast
from rankmesh._rendezvous.store import AtStore
from rankmesh._rendezvous.tcp import AtAddress
from rankmesh._rendezvous.torchrun import store_at
from rankmesh._rendezvous.urls import hosting_in, is_multicast, number_in, path_of, place_of, url_for
from rankmesh_agent.config.settings import Hosting, Settings
from rankmesh_agent.wire.schemas import UNASSIGNED

_STARTERS = "'rankmesh run', torchrun, srun, mpirun, mpiexec, and an Indexed Job of Kubernetes"
"""Who tells a process which rank it is, and where rank 0 is."""


class Rendezvous(NamedTuple):
    """Where and as whom to join.

    Attributes:
        rank: this process's rank, UNASSIGNED (-1) if the gateway is to choose one.
        world_size: ranks in the job.
        job: the job's name.
        find: returns the gateway's URL, None while it is not known.
        bind_host: the address this rank's agent listens on.
        hosting: whether to attach to a standalone agent; None: wherever the gateway has some.
        close: ends what was hosted for the job.
        close_in_child: lets go of that in a forked child.
    """

    rank: int
    world_size: int
    job: str
    find: Callable[[], str | None]
    bind_host: str
    hosting: Literal["attached", "embedded"] | None
    close: Callable[[], None]
    close_in_child: Callable[[], None]


def rendezvous(
    init_method: str | None,
    rank: int,
    world_size: int,
    settings: Settings,
    *,
    store: Any = None,
    timeout: float | None = None,
) -> Rendezvous:
    """Return where to join; host the gateway if that is up to this process and there is none.

    Args:
        init_method: ``env://``, ``tcp://host:port`` (a multicast address, too), ``file:///path``, ``http://host:port``
            or a scheme of register_rendezvous_handler, each with optional ``?rank=…&world_size=…``; ``env://`` if
            neither it nor a store is given.
        rank: this process's rank; -1 to take it from the URL or the environment, and if they do not say either, and
            the method is none of ``env://`` and a store, to be given one.
        world_size: ranks in the job, -1 to take it from the URL or the environment.
        settings: what the environment says.
        store: a key-value store that all ranks share, instead of an init method. Then rank and world size are required.
        timeout: seconds the join may take, which a registered handler is told; the settings' when left out.

    Raises:
        TypeError: the init method is no text.
        ValueError: something is missing, makes no sense, or contradicts something else; says what to set.
        AddressInUseError: rank 0 cannot host the gateway there.
        DistNetworkError: this process has to host the gateway and cannot, or there is no way to it.
    """
    if store is not None:
        if init_method is not None:
            raise ValueError(f"give either init_method={init_method!r} or store=, not both")
        if rank < 0 or world_size < 1:
            raise ValueError(f"store= needs rank= and world_size= as well, got rank={rank}, world_size={world_size}")
        return at(AtStore(store, _checked(rank, world_size), settings), rank, world_size, settings.hosting)
    if not isinstance(init_method, str | None):
        raise TypeError(f"init_method must be a URL, tcp://host:port for example, got {init_method!r}")
    method = init_method or "env://"
    url = urlsplit(method)
    if handlers.registered(url.scheme):
        seconds = timedelta(seconds=settings.timeout if timeout is None else timeout)
        store, rank, world_size = next(handlers.rendezvous(method, rank, world_size, timeout=seconds))
        return rendezvous(None, rank, world_size, settings, store=store)
    if _said(rank, url, "rank") is not None:
        settings = replace(settings, launcher=None)  # who gives ranks may mean other processes than the launcher's
    settings = replace(settings, job=_job(settings))
    required = url.scheme == "env"
    rank = _number("rank", rank, url, settings, settings.rank, default=None if required else UNASSIGNED)
    world_size = _number("world_size", world_size, url, settings, settings.world_size)
    hosting = hosting_in(url) or settings.hosting
    meeting = _meeting(url, method, _checked(rank, world_size), world_size, settings)
    return at(meeting, rank, world_size, hosting, either=url.scheme == "http")


def at(meeting: Meeting, rank: int, world_size: int, hosting: Hosting, *, either: bool = False) -> Rendezvous:
    """Return where to join.

    Args:
        meeting: finds the gateway.
        rank: this process's rank.
        world_size: ranks in the job.
        hosting: what the user says.
        either: whether the gateway says where the agent is if the user does not.
    """
    chosen = hosting if hosting != "auto" else None if either else "embedded"
    return Rendezvous(
        rank, world_size, meeting.job, meeting.find, meeting.bind_host, chosen, meeting.close, meeting.close_in_child
    )


def _meeting(url: SplitResult, method: str, rank: int, world_size: int, settings: Settings) -> Meeting:
    match url.scheme:
        case "env":
            return _from_environment(rank, world_size, settings)
        case "tcp":
            host, port = place_of(url, method)
            if is_multicast(host):
                return AtMulticast(host, port, rank, settings)
            return _at_address(host, port, rank, world_size, settings)
        case "file":
            return AtFile(path_of(url, method), settings)
        case "http":
            host, port = place_of(url, method)
            return Known(url_for(host, port), host, port, settings)
    raise ValueError(
        f"init_method {method!r} is not known: use env://, tcp://host:port, file:///path or http://host:port, or "
        "register_rendezvous_handler() for a scheme of your own"
    )


def _from_environment(rank: int, world_size: int, settings: Settings) -> Meeting:
    if settings.gateway is not None:
        host, port = place_of(urlsplit(settings.gateway), f"RANKMESH_GATEWAY={settings.gateway}")
        return Known(url_for(host, port), host, port, settings)
    if settings.launcher is not None:
        settings = placed(settings, settings.launcher)
    if settings.master_port is None:
        raise ValueError(
            "env:// needs MASTER_PORT, the port of the gateway that rank 0 hosts (and MASTER_ADDR, its host); "
            f"{_STARTERS} say them"
        )
    if settings.master_addr is None and rank != 0:
        raise ValueError(f"env:// needs MASTER_ADDR, the host of rank 0; {_STARTERS} say it")
    if settings.torchrun_store and settings.master_addr is not None:
        return AtStore(store_at(settings.master_addr, settings.master_port), rank, settings)
    return _at_address(settings.master_addr or LOOPBACK, settings.master_port, rank, world_size, settings)


def _job(settings: Settings) -> str:
    """Return the job's name: what somebody chose, else what the launcher calls it."""
    launchers = settings.launcher.job() if settings.launcher is not None and settings.job == Settings.job else ""
    return launchers or settings.job


def _at_address(host: str, port: int, rank: int, world_size: int, settings: Settings) -> Meeting:
    if port == 0 and world_size > 1:
        raise ValueError("port 0, any free one, is for a world of one rank: the others could not know which it is")
    return AtAddress(host, port, rank, settings)


def _checked(rank: int, world_size: int) -> int:
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if not UNASSIGNED <= rank < world_size:
        raise ValueError(f"rank must be between 0 and world_size - 1 = {world_size - 1}, got {rank}")
    return rank


def _number(
    name: str, given: int, url: SplitResult, settings: Settings, environment: int | None, default: int | None = None
) -> int:
    """Return the first that is said of an argument, the URL and the environment; -1 says nothing."""
    for number in (_said(given, url, name), environment, default):
        if number is not None:
            return number
    if settings.launcher is not None:
        raise ValueError(f"{name} is not known: {settings.launcher.problem}. Or pass {name}=")
    raise ValueError(
        f"{name} is not known: pass {name}=, append ?{name}= to the init_method, set {name.upper()}, or start with "
        f"what sets it: {_STARTERS}"
    )


def _said(given: int, url: SplitResult, name: str) -> int | None:
    """Return what an argument says, or the URL; None if neither says anything, as -1 does."""
    return next((number for number in (given, number_in(url, name)) if number not in (None, -1)), None)
