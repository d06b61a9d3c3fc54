"""Init methods: resolves URL, arguments and environment to rank, world size and gateway."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal, NamedTuple
from urllib.parse import SplitResult, urlsplit

from rankmesh._rendezvous import handlers
from rankmesh._rendezvous.handlers import host_and_port, hosting_parameter, is_multicast, number_parameter, path_of
from rankmesh._rendezvous.locator import LOOPBACK, GatewayLocator, KnownGateway, with_master_address
from rankmesh._rendezvous.multicast import MulticastLocator
from rankmesh._rendezvous.store import StoreLocator, torchrun_store
from rankmesh._rendezvous.tcp import TcpLocator
from rankmesh_agent.config.settings import Hosting, Settings
from rankmesh_agent.net.sockets import url_for
from rankmesh_agent.wire.schemas import UNASSIGNED

_LAUNCHERS = "'rankmesh run', torchrun, srun, mpirun, mpiexec, and an Indexed Job of Kubernetes"
"""The launchers that define rank, world size and the address of rank 0."""

_NO_HOST = 1
"""A rank that does not host the gateway."""
_HTTP = ("http", "https")


class Rendezvous(NamedTuple):
    """The parameters of a join.

    Attributes:
        rank: this process's rank, UNASSIGNED (-1) if the gateway assigns one.
        find: returns the gateway's URL, None while it is unknown.
        hosting: whether to attach to a standalone agent; None: if agents are registered at the gateway.
    """

    rank: int
    world_size: int
    job: str
    find: Callable[[], str | None]
    bind_host: str
    hosting: Literal["attached", "embedded"] | None
    close: Callable[[], None]
    awaits_growth: bool = False


def resolve_late_join(
    init_method: str | None, rank: int, world_size: int, settings: Settings, *, store: Any = None
) -> Rendezvous:
    """Return the parameters of a join of a process that waits for a running job's world to grow."""
    if not isinstance(init_method, str | None):
        raise TypeError(f"init_method must be a URL, tcp://host:port for example, got {init_method!r}")
    method = init_method or "env://"
    url = urlsplit(method)
    given = {name: _given(value, url, name) for name, value in (("rank", rank), ("world_size", world_size))}
    if store is not None or handlers.registered(url.scheme):
        raise ValueError("join=True finds the job through its gateway: give its address as the init_method, no store")
    if any(number is not None for number in given.values()):
        named = ", ".join(f"{name}={number}" for name, number in given.items() if number is not None)
        raise ValueError(f"join=True leaves rank and world size to the growth of the world: leave out {named}")
    settings = _with_launchers_job(settings)
    hosting = hosting_parameter(url) or settings.hosting
    locator = _locator(url, method, _NO_HOST, _NO_HOST + 1, settings)
    found = rendezvous_through(locator, UNASSIGNED, 1, hosting, either=url.scheme in _HTTP)._replace(awaits_growth=True)
    if settings.join and settings.rank is not None and settings.world_size is not None:
        # In place of a process that may have been lost before the first world was complete.
        return found._replace(rank=settings.rank, world_size=settings.world_size)
    return found


def resolve_init_method(
    init_method: str | None,
    rank: int,
    world_size: int,
    settings: Settings,
    *,
    store: Any = None,
    timeout: float | None = None,
) -> Rendezvous:
    """Return the parameters of the join; hosts the gateway if this process is the one to do so.

    Args:
        init_method: a URL, with optional ``?rank=…&world_size=…``; ``env://`` if neither it nor a store is given.
        rank: this process's rank; -1 to take it from the URL or the environment. If neither has one, the gateway
            assigns it (except with ``env://`` and ``store=``, which require it).
        world_size: ranks in the job, -1 to take it from the URL or the environment.
        store: a key-value store shared by all ranks, instead of an init method; requires rank and world size.
        timeout: seconds for the join, passed to a registered handler; the settings' by default.
    """
    if store is not None:
        if init_method is not None:
            raise ValueError(f"give either init_method={init_method!r} or store=, not both")
        if rank < 0 or world_size < 1:
            raise ValueError(f"store= needs rank= and world_size= as well, got rank={rank}, world_size={world_size}")
        return rendezvous_through(
            StoreLocator(store, _checked(rank, world_size), settings), rank, world_size, settings.hosting
        )
    if not isinstance(init_method, str | None):
        raise TypeError(f"init_method must be a URL, tcp://host:port for example, got {init_method!r}")
    method = init_method or "env://"
    url = urlsplit(method)
    if handlers.registered(url.scheme):
        seconds = timedelta(seconds=settings.timeout if timeout is None else timeout)
        store, rank, world_size = next(handlers.rendezvous(method, rank, world_size, timeout=seconds))
        return resolve_init_method(None, rank, world_size, settings, store=store)
    if _given(rank, url, "rank") is not None:
        settings = replace(settings, launcher=None)  # explicit ranks may be of other processes than the launcher's
    settings = _with_launchers_job(settings)
    required = url.scheme == "env"
    rank = _number("rank", rank, url, settings, settings.rank, default=None if required else UNASSIGNED)
    world_size = _number("world_size", world_size, url, settings, settings.world_size)
    hosting = hosting_parameter(url) or settings.hosting
    locator = _locator(url, method, _checked(rank, world_size), world_size, settings)
    return rendezvous_through(locator, rank, world_size, hosting, either=url.scheme in _HTTP)


def rendezvous_through(
    locator: GatewayLocator, rank: int, world_size: int, hosting: Hosting, *, either: bool = False
) -> Rendezvous:
    """Return the parameters of a join through a locator; ``either``: ``auto`` leaves the choice to the gateway."""
    chosen = hosting if hosting != "auto" else None if either else "embedded"
    return Rendezvous(rank, world_size, locator.job, locator.find, locator.bind_host, chosen, locator.close)


def _with_launchers_job(settings: Settings) -> Settings:
    if settings.launcher is not None and not settings.names_job:
        return replace(settings, job=settings.launcher.job() or settings.job)
    return settings


def _locator(url: SplitResult, method: str, rank: int, world_size: int, settings: Settings) -> GatewayLocator:
    match url.scheme:
        case "env":
            return _env_locator(rank, world_size, settings)
        case "tcp":
            host, port = host_and_port(url, method)
            if is_multicast(host):
                return MulticastLocator(host, port, rank, settings)
            return _at_address(host, port, rank, world_size, settings)
        case "file":
            from rankmesh._rendezvous.file import FileLocator  # with SQLite

            return FileLocator(path_of(url, method), settings)
        case "http" | "https":
            host, port = host_and_port(url, method)
            return KnownGateway(url_for(host, port, url.scheme), host, port, settings)
    raise ValueError(
        f"init_method {method!r} is not known: use env://, tcp://host:port, file:///path or http://host:port, or "
        "register_rendezvous_handler() for a scheme of your own"
    )


def _env_locator(rank: int, world_size: int, settings: Settings) -> GatewayLocator:
    if settings.gateway is not None:
        known = urlsplit(settings.gateway)
        host, port = host_and_port(known, f"RANKMESH_GATEWAY={settings.gateway}")
        return KnownGateway(url_for(host, port, known.scheme), host, port, settings)
    if settings.launcher is not None:
        settings = with_master_address(settings, settings.launcher)
    if settings.master_port is None:
        raise ValueError(
            "env:// needs MASTER_PORT, the port of the gateway that rank 0 hosts (and MASTER_ADDR, its host); "
            f"{_LAUNCHERS} set them"
        )
    if settings.master_addr is None and rank != 0:
        raise ValueError(f"env:// needs MASTER_ADDR, the host of rank 0; {_LAUNCHERS} set it")
    if settings.torchrun_store and settings.master_addr is not None:
        return StoreLocator(torchrun_store(settings.master_addr, settings.master_port), rank, settings)
    return _at_address(settings.master_addr or LOOPBACK, settings.master_port, rank, world_size, settings)


def _at_address(host: str, port: int, rank: int, world_size: int, settings: Settings) -> GatewayLocator:
    if port == 0 and world_size > 1:
        raise ValueError("port 0, any free one, is for a world of one rank: the others could not know which it is")
    return TcpLocator(host, port, rank, settings)


def _checked(rank: int, world_size: int) -> int:
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if not UNASSIGNED <= rank < world_size:
        raise ValueError(f"rank must be between 0 and world_size - 1 = {world_size - 1}, got {rank}")
    return rank


def _number(
    name: str, given: int, url: SplitResult, settings: Settings, environment: int | None, default: int | None = None
) -> int:
    """Return the value of the argument, of the URL or of the environment, in this order; -1 means missing."""
    for number in (_given(given, url, name), environment, default):
        if number is not None:
            return number
    if settings.launcher is not None:
        raise ValueError(f"{name} is not known: {settings.launcher.problem}. Or pass {name}=")
    raise ValueError(
        f"{name} is not known: pass {name}=, append ?{name}= to the init_method, set {name.upper()}, or start with "
        f"what sets it: {_LAUNCHERS}"
    )


def _given(given: int, url: SplitResult, name: str) -> int | None:
    """Return the number of the argument or of the URL, None if both are missing or -1."""
    return next((number for number in (given, number_parameter(url, name)) if number not in (None, -1)), None)
