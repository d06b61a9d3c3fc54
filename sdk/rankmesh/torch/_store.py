"""RankMesh's key-value stores as stores of torch's."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed

from rankmesh._session.init import get_default_store
from rankmesh._session.session import Session, require_session
from rankmesh._stores.base import Store as RankMeshStore
from rankmesh._stores.commands import CommandStore, UnusableStore
from rankmesh._stores.methods import METHODS, WAIT, Method
from rankmesh.torch._errors import translating

_NOW = timedelta(0)
_SHORTEST = timedelta(milliseconds=1)
_ENDLESS = timedelta(days=36500)


class Store(torch.distributed.Store):
    """A store of RankMesh's for torch, in the place of any ``torch.distributed.Store``.

    ::

        torch.distributed.init_process_group("gloo", store=Store(rankmesh.FileStore(path)), rank=rank, world_size=size)

    Methods, results and errors are those of RankMesh's store; the errors are torch's, too: a timeout is a
    ``rankmesh.errors.StoreTimeoutError`` and a ``torch.distributed.DistStoreError``.

    The timeout is at first that of RankMesh's store, and set here afterwards: the timeout given to ``set_timeout``, by
    the program or by torch, becomes that of RankMesh's store with the next call that waits. As with torch's stores, a
    timeout of 0 means no limit. A negative one expires at once.

    torch's groups and prefixes refer only to the half of a store that is written in C++. So each store stays alive
    until it is closed, even without other references, and with it the connections, file or port of RankMesh's store.

    Args:
        store: a store of RankMesh's; by default that of this process's job, then with a timeout of its own.

    Raises:
        TypeError: ``store`` is not a store of RankMesh's.
        ValueError: there is none given, and rankmesh.init_process_group has not been called.
    """

    def __init__(self, store: RankMeshStore | None = None) -> None:
        super().__init__()
        if store is None:
            store = translating(get_default_store().clone)
        elif not isinstance(store, RankMeshStore):
            hint = "; torch takes its own as they are" if isinstance(store, torch.distributed.Store) else ""
            raise TypeError(f"store must be one of rankmesh's stores, got {type(store).__qualname__}{hint}")
        self._store = store
        self.set_timeout(max(store.timeout, _SHORTEST))
        _open_stores.add(self)

    def close(self) -> None:
        """Release RankMesh's store, which is closed unless something else refers to it; calls after that fail.

        Close a store when no group of torch's uses it any more. Does nothing the second time.
        """
        if self in _open_stores:
            _open_stores.remove(self)
            self._store = CommandStore(UnusableStore(f"{self!r} is closed; make a new one"), self.timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        """Return when all ``keys`` are set.

        Args:
            keys: the keys.
            timeout: time limit, timedelta or seconds; the store's timeout by default.
        """
        limit = () if timeout is None else (_limit(timeout),)
        translating(self._with_timeout().wait if timeout is None else self._store.wait, keys, *limit)

    def clone(self) -> Store:
        """Return another store object with the same keys and timeout."""
        found = Store(translating(self._store.clone))
        found.set_timeout(self.timeout)
        return found

    def has_extended_api(self) -> bool:
        """Return whether the store can append, set and get several keys in one step, and has queues."""
        return self._store.has_extended_api()

    def _with_timeout(self) -> RankMeshStore:
        """Return RankMesh's store with the current timeout: torch holds it in C++, and a change makes no call here."""
        limit = _limit(self.timeout)
        if self._store.timeout != limit:
            translating(self._store.set_timeout, limit)
        return self._store

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"cannot pickle {self!r}: make one in each process")

    def __repr__(self) -> str:
        return f"rankmesh.torch.Store({self._store!r})"


def _forwarding(method: Method[Any]) -> Callable[..., Any]:
    """Return a method of Store that calls the same one of RankMesh's store."""

    @functools.wraps(getattr(RankMeshStore, method.name))
    def forward(self: Store, *arguments: Any, **options: Any) -> Any:
        store = self._with_timeout() if method.waits else self._store
        return translating(getattr(store, method.name), *arguments, **options)

    return forward


for _method in METHODS:
    if _method is not WAIT:
        setattr(Store, _method.name, _forwarding(_method))
Store.deleteKey, Store.getNumKeys = Store.delete_key, Store.num_keys  # the names in torch's C++


def fresh_job_store() -> torch.distributed.PrefixStore:
    """Return the job's own store for another default group of torch's, without the keys of earlier ones.

    All ranks call it equally often in each world.
    """
    session = require_session()
    for left in [each for each in _job_stores if each is not session]:
        _job_stores.pop(left).close()  # only groups of a session that has ended refer to it
    store = _job_stores.get(session) or _job_stores.setdefault(session, Store())
    world = session.group._communicator.id
    _rounds[world] += 1
    return torch.distributed.PrefixStore(f"torch/{world:016x}/{_rounds[world]}", store)


def _limit(timeout: timedelta | float) -> timedelta:
    """Return RankMesh's equivalent of a timeout of torch's, a timedelta or seconds."""
    given = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    return max(given, _NOW) if given else _ENDLESS


_rounds: Counter[int] = Counter()
"""Stores made in each world, by the id of its group: the ranks that join a world have made none in those before."""
_open_stores: set[Store] = set()
_job_stores: dict[Session, Store] = {}
