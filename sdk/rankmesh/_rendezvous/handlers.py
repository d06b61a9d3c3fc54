"""Init methods that are URLs: their parts, and the schemes that the program has registered."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast, get_args
from urllib.parse import SplitResult, parse_qs, unquote, urlencode, urlsplit

from rankmesh_agent.config.settings import Hosting

_TIMEOUT = timedelta(seconds=300)
"""Default timeout of the stores of built-in schemes, as in torch."""
BUILT_IN = frozenset({"env", "tcp", "file", "http", "https"})
Handler = Callable[..., Iterator[tuple[Any, int, int]]]

_handlers: dict[str, Handler] = {}


def register_rendezvous_handler(scheme: str, handler: Handler) -> None:
    """Register a function that provides the store for ``init_process_group(init_method="scheme://…")``.

    Args:
        scheme: the part of the URL before ``://``, any case; not ``env``, ``tcp``, ``file`` or ``http``.
        handler: called with the URL, to which ``?rank=…&world_size=…`` is appended if they were passed to
            init_process_group, and with ``timeout=`` (a timedelta). It yields ``(store, rank, world_size)``: a
            key-value store shared by all ranks (``set``, ``get`` and ``wait`` are used), this process's rank, and the
            number of ranks.

    Raises:
        RuntimeError: the scheme is taken.
        TypeError: the handler is not callable.
    """
    if not callable(handler):
        raise TypeError(f"handler must be a function that yields (store, rank, world_size), got {handler!r}")
    if scheme.lower() in BUILT_IN or registered(scheme):
        raise RuntimeError(f"there is a rendezvous handler for {scheme}:// already; choose another scheme")
    _handlers[scheme.lower()] = handler


def registered(scheme: str) -> bool:
    """Return whether a handler is registered for a scheme."""
    return scheme.lower() in _handlers


def rendezvous(url: str, rank: int = -1, world_size: int = -1, **options: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield a store shared by the ranks, this process's rank, and the number of ranks.

    init_process_group needs no store for the built-in methods; this is for programs that want one.

    Args:
        url: ``tcp://host:port`` (a TCPStore served by rank 0), ``file:///path`` (a FileStore), or a registered scheme.
        rank: this process's rank, -1 if the URL or the handler defines it.
        world_size: number of ranks, -1 likewise.
        options: passed to the handler; the built-in ones take ``timeout=``, a timedelta.

    Raises:
        RuntimeError: there is no handler for the scheme, or it yields nothing.
        ValueError: both the URL and the arguments define rank or world size; or neither does.
    """
    split = urlsplit(url)
    known: dict[str, Handler] = {"tcp": _tcp, "file": _file, **_handlers}
    if split.scheme not in known:
        raise RuntimeError(
            f"there is no rendezvous handler for {split.scheme}://, only for "
            f"{', '.join(f'{scheme}://' for scheme in sorted(known))}"
        )
    given = {name: value for name, value in (("rank", rank), ("world_size", world_size)) if value != -1}
    if any(number_parameter(split, name) is not None for name in given):
        raise ValueError(f"{url!r} says {' and '.join(given)} already; leave out the argument, or that part of the URL")
    query = "&".join(filter(None, (split.query, urlencode(given))))
    found = known[split.scheme](split._replace(query=query).geturl(), **options)
    try:
        yield next(found)
    except StopIteration:
        raise RuntimeError(f"the rendezvous handler for {split.scheme}:// yielded nothing") from None
    yield from found


def _tcp(url: str, timeout: timedelta = _TIMEOUT) -> Iterator[tuple[Any, int, int]]:
    split = urlsplit(url)
    host, port = host_and_port(split, url)
    rank, world_size = _required(split, url)
    from rankmesh._stores import TCPStore

    yield TCPStore(host, port, world_size, is_master=rank == 0, timeout=timeout), rank, world_size


def _file(url: str, timeout: timedelta = _TIMEOUT) -> Iterator[tuple[Any, int, int]]:
    split = urlsplit(url)
    path = path_of(split, url)
    rank, world_size = _required(split, url)
    from rankmesh._stores import FileStore

    store = FileStore(str(path), world_size)
    store.set_timeout(timeout)
    yield store, rank, world_size


def _required(url: SplitResult, text: str) -> tuple[int, int]:
    rank, world_size = number_parameter(url, "rank"), number_parameter(url, "world_size")
    if rank is None or world_size is None:
        raise ValueError(f"{text!r} lacks ?rank=…&world_size=…; append them, or pass rank= and world_size=")
    return rank, world_size


def host_and_port(url: SplitResult, text: str) -> tuple[str, int]:
    """Return host and port."""
    try:
        host, port = url.hostname, url.port
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None
    if not host or port is None:
        raise ValueError(f"{text!r} needs a host and a port, for example {url.scheme}://127.0.0.1:29500")
    return host, port


def path_of(url: SplitResult, text: str) -> Path:
    """Return the path of a file."""
    path = unquote(url.path)
    if url.netloc or not path.startswith("/"):
        raise ValueError(f"{text!r} needs an absolute path, for example file:///tmp/rendezvous")
    return Path(path)


def number_parameter(url: SplitResult, name: str) -> int | None:
    """Return the number of the query parameter ``name``, None if it is absent."""
    values = parse_qs(url.query).get(name)
    if values is None:
        return None
    try:
        return int(values[-1])
    except ValueError:
        raise ValueError(f"{name}={values[-1]!r} in the init_method is not a whole number") from None


def hosting_parameter(url: SplitResult) -> Hosting | None:
    """Return the query parameter ``hosting``, None if it is absent."""
    values = parse_qs(url.query).get("hosting")
    if values is None:
        return None
    if values[-1] not in get_args(Hosting):
        raise ValueError(f"hosting={values[-1]!r} in the init_method must be 'attached' or 'embedded'")
    return cast(Hosting, values[-1])


def is_multicast(host: str) -> bool:
    """Return whether a host is a multicast address."""
    try:
        return ipaddress.ip_address(host).is_multicast
    except ValueError:
        return False
