"""From an init method to a gateway's HTTP address: who hosts it, and where this rank listens."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from rankmesh_agent.wire.errors import AddressInUseError, DistNetworkError
from rankmesh_agent.wire.settings import Settings, is_loopback, require_token_beyond_loopback
from rankmesh_agent.wire.sockets import address_of_interface, address_towards, bind, url_of

LOOPBACK = "127.0.0.1"


class Rendezvous(NamedTuple):
    """Where and as whom to join.

    Attributes:
        rank: this process's rank.
        world_size: ranks in the job.
        find: returns the gateway's URL, None while it is not known.
        bind_host: the address this rank's agent listens on.
        close: ends what was hosted for the job.
        forget: lets go of that in a forked child.
    """

    rank: int
    world_size: int
    find: Callable[[], str | None]
    bind_host: str
    close: Callable[[], None]
    forget: Callable[[], None]


def rendezvous(init_method: str, rank: int, world_size: int, settings: Settings) -> Rendezvous:
    """Return where to join; at rank 0, host the gateway unless one is there.

    Args:
        init_method: ``env://``, ``tcp://host:port``, ``file:///path`` or ``http://host:port``, each with optional
            ``?rank=…&world_size=…``.
        rank: this process's rank, -1 to take it from the URL or the environment.
        world_size: ranks in the job, -1 likewise.
        settings: what the environment says.

    Raises:
        ValueError: something is missing, makes no sense, or contradicts something else; says what to set.
        AddressInUseError: rank 0 cannot host the gateway there.
    """
    url = urlsplit(init_method)
    asked = {name: values[-1] for name, values in parse_qs(url.query).items()}
    rank = _number("rank", rank, asked, settings.rank, "RANK")
    world_size = _number("world_size", world_size, asked, settings.world_size, "WORLD_SIZE")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be between 0 and world_size - 1 = {world_size - 1}, got {rank}")
    match url.scheme:
        case "env":
            return _from_environment(rank, world_size, settings)
        case "tcp":
            host, port = _place(url, init_method)
            return _at_address(host, port, rank, world_size, settings)
        case "file":
            return _at_file(_path(url, init_method), rank, world_size, settings)
        case "http":
            host, port = _place(url, init_method)
            return _at_gateway(url_for(host, port), host, port, rank, world_size, settings)
    raise ValueError(
        f"init_method {init_method!r} is not known: use env://, tcp://host:port, file:///path or http://host:port"
    )


def url_for(host: str, port: int) -> str:
    """Return the base URL of a host and port."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _from_environment(rank: int, world_size: int, settings: Settings) -> Rendezvous:
    if settings.gateway is not None:
        url = urlsplit(settings.gateway)
        host, port = _place(url, f"RANKMESH_GATEWAY={settings.gateway}")
        return _at_gateway(url_for(host, port), host, port, rank, world_size, settings)
    if settings.master_port is None:
        raise ValueError(
            "env:// needs MASTER_PORT, the port of the gateway that rank 0 hosts (and MASTER_ADDR, its host); "
            "'rankmesh run' sets them"
        )
    if settings.master_addr is None and rank != 0:
        raise ValueError("env:// needs MASTER_ADDR, the host of rank 0; 'rankmesh run' sets it")
    return _at_address(settings.master_addr or LOOPBACK, settings.master_port, rank, world_size, settings)


def _at_gateway(url: str, host: str, port: int, rank: int, world_size: int, settings: Settings) -> Rendezvous:
    return Rendezvous(rank, world_size, lambda: url, _listen_on(settings, host, port), _nothing, _nothing)


def _at_address(host: str, port: int, rank: int, world_size: int, settings: Settings) -> Rendezvous:
    url = url_for(host, port)
    close = forget = _nothing
    if port == 0 and world_size > 1:
        raise ValueError("port 0, any free one, is for a world of one rank: the others could not know which it is")
    if rank == 0:
        try:
            hosted = _Hosted(settings.bind or host, port, settings, names=[host])
            close, forget = hosted.close, hosted.forget
            if port == 0:
                url = hosted.url
        except AddressInUseError:
            from rankmesh_agent.gateway import is_gateway

            if not is_gateway(url):
                raise
    return Rendezvous(rank, world_size, lambda: url, _listen_on(settings, host, port), close, forget)


def _at_file(path: Path, rank: int, world_size: int, settings: Settings) -> Rendezvous:
    host = _chosen_host(settings) or LOOPBACK
    from rankmesh_agent.gateway import is_gateway

    def find() -> str | None:
        url = _read(path)  # it may be left from an earlier job, and its port another program's by now
        return url if url is not None and is_gateway(url) else None

    if rank != 0:
        return Rendezvous(rank, world_size, find, host, _nothing, _nothing)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ValueError(
            f"file://{path}: {error.strerror}; the file is made if needed, but its directory must exist and be writable"
        ) from error
    with os.fdopen(descriptor, "r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)  # two processes that both claim to be rank 0 must find one gateway
        url = _url_in(file.read())
        if url is not None and is_gateway(url):
            found = url
            return Rendezvous(rank, world_size, lambda: found, host, _nothing, _nothing)
        hosted = _Hosted(host, 0, settings)
        file.seek(0)
        file.truncate()
        json.dump({"gateway": hosted.url}, file)
        file.flush()

    def close() -> None:
        hosted.close()
        if _read(path) == hosted.url:
            path.unlink(missing_ok=True)

    return Rendezvous(rank, world_size, lambda: hosted.url, host, close, hosted.forget)


class _Hosted:
    """A gateway in this process."""

    def __init__(self, host: str, port: int, settings: Settings, names: list[str] | None = None) -> None:
        require_token_beyond_loopback(host, settings.token, "the gateway")
        from rankmesh_agent.serving import HttpThread
        from rankmesh_gateway.registry import Registry

        listener = bind(host, port, what="rank 0 hosts the gateway")
        self.url = url_of(listener)
        self._registry = Registry()

        def make() -> Any:
            from rankmesh_gateway.app import create_app

            return create_app(self._registry, token=settings.token, names=[*(names or []), *settings.advertise])

        self._http = HttpThread(make, listener, "rankmesh-gateway")
        self._http.start()

    def close(self) -> None:
        """End the waits, then the service."""
        self._registry.close()
        self._http.stop()

    def forget(self) -> None:
        """In a forked child: let go of the listening socket."""
        self._http.forget()


def _listen_on(settings: Settings, gateway_host: str, gateway_port: int) -> str:
    """Choose the address for this rank's agent: the one that faces the gateway, unless something else is set."""
    chosen = _chosen_host(settings)
    if chosen is not None:
        return chosen
    if is_loopback(gateway_host):
        return LOOPBACK if gateway_host == "localhost" else gateway_host
    return address_towards(gateway_host, gateway_port)


def _chosen_host(settings: Settings) -> str | None:
    if settings.bind is not None:
        return settings.bind
    return address_of_interface(settings.interface) if settings.interface is not None else None


def _read(path: Path) -> str | None:
    """Return the URL in a rendezvous file, None while there is none."""
    try:
        with path.open() as file:
            fcntl.lockf(file, fcntl.LOCK_SH)
            return _url_in(file.read())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DistNetworkError(f"cannot read file://{path}: {error.strerror}", address=str(path)) from error


def _url_in(text: str) -> str | None:
    try:
        url = json.loads(text)["gateway"]
    except (ValueError, KeyError, TypeError):
        return None
    return url if isinstance(url, str) else None


def _place(url: SplitResult, text: str) -> tuple[str, int]:
    try:
        host, port = url.hostname, url.port
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None
    if not host or port is None:
        raise ValueError(f"{text!r} needs a host and a port, for example {url.scheme}://127.0.0.1:29500")
    return host, port


def _path(url: SplitResult, text: str) -> Path:
    path = unquote(url.path)
    if url.netloc or not path.startswith("/"):
        raise ValueError(f"{text!r} needs an absolute path, for example file:///tmp/rendezvous")
    return Path(path)


def _number(name: str, given: int, asked: dict[str, str], environment: int | None, variable: str) -> int:
    if given != -1:
        return int(given)
    if name in asked:
        try:
            return int(asked[name])
        except ValueError:
            raise ValueError(f"{name}={asked[name]!r} in the init_method is not a whole number") from None
    if environment is None:
        raise ValueError(f"{name} is not known: pass {name}=, append ?{name}= to the init_method, or set {variable}")
    return environment


def _nothing() -> None:
    pass
