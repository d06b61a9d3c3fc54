"""Schemes of init methods that a program brings along."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import SplitResult, urlencode, urlsplit

from rankmesh._rendezvous.urls import number_in, path_of, place_of

_TIMEOUT = timedelta(seconds=300)
"""How long the stores of the built-in schemes wait unless told otherwise, as torch's."""
BUILT_IN = frozenset({"env", "tcp", "file", "http"})
Handler = Callable[..., Iterator[tuple[Any, int, int]]]

_handlers: dict[str, Handler] = {}


def register_rendezvous_handler(scheme: str, handler: Handler) -> None:
    """Make ``init_process_group(init_method="scheme://…")`` meet in a store that a function finds.

    Args:
        scheme: the part of the URL before ``://``, any case; not ``env``, ``tcp``, ``file`` or ``http``.
        handler: called with the URL, to which ``?rank=…&world_size=…`` is appended as far as they were given to
            init_process_group, and with ``timeout=`` (a timedelta). It yields ``(store, rank, world_size)``: a
            key-value store that all ranks share (``set``, ``get`` and ``wait`` are used), this process's rank, and how
            many ranks there are.

    Raises:
        RuntimeError: the scheme is taken.
        TypeError: the handler cannot be called.

    Source: torch.distributed.register_rendezvous_handler
    """
    if not callable(handler):
        raise TypeError(f"handler must be a function that yields (store, rank, world_size), got {handler!r}")
    if scheme.lower() in BUILT_IN or registered(scheme):
        raise RuntimeError(f"there is a rendezvous handler for {scheme}:// already; choose another scheme")
    _handlers[scheme.lower()] = handler


def registered(scheme: str) -> bool:
    """Whether a handler was registered for a scheme."""
    return scheme.lower() in _handlers


def rendezvous(url: str, rank: int = -1, world_size: int = -1, **options: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield a store in which the ranks can meet, this process's rank, and how many ranks there are.

    init_process_group needs no store for the methods that are built in; this is for programs that want one.

    Args:
        url: ``tcp://host:port`` (a TCPStore, which rank 0 serves), ``file:///path`` (a FileStore), or a scheme that a
            handler was registered for.
        rank: this process's rank, -1 if the URL says it or the handler finds it.
        world_size: how many ranks there are, -1 likewise.
        options: passed on to the handler; those built in take ``timeout=``, a timedelta.

    Raises:
        RuntimeError: there is no handler for the scheme, or it yields nothing.
        ValueError: the URL says rank or world size as well as the arguments; or neither does.

    Source: torch.distributed.rendezvous
    """
    split = urlsplit(url)
    known: dict[str, Handler] = {"tcp": _tcp, "file": _file, **_handlers}
    if split.scheme not in known:
        raise RuntimeError(
            f"there is no rendezvous handler for {split.scheme}://, only for "
            f"{', '.join(f'{scheme}://' for scheme in sorted(known))}"
        )
    said = {name: value for name, value in (("rank", rank), ("world_size", world_size)) if value != -1}
    if any(number_in(split, name) is not None for name in said):
        raise ValueError(f"{url!r} says {' and '.join(said)} already; leave out the argument, or that part of the URL")
    query = "&".join(filter(None, (split.query, urlencode(said))))
    found = known[split.scheme](split._replace(query=query).geturl(), **options)
    try:
        yield next(found)
    except StopIteration:
        raise RuntimeError(f"the rendezvous handler for {split.scheme}:// yielded nothing") from None
    yield from found


def _tcp(url: str, timeout: timedelta = _TIMEOUT) -> Iterator[tuple[Any, int, int]]:
    split = urlsplit(url)
    host, port = place_of(split, url)
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
    rank, world_size = number_in(url, "rank"), number_in(url, "world_size")
    if rank is None or world_size is None:
        raise ValueError(f"{text!r} lacks ?rank=…&world_size=…; append them, or pass rank= and world_size=")
    return rank, world_size
