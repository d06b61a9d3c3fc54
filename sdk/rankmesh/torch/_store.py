"""The mesh's key-value stores as stores of torch's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NoReturn, ParamSpec, TypeVar

import torch.distributed

from rankmesh._session.init import get_default_store
from rankmesh._session.session import Session, require_session
from rankmesh._stores.base import Store as MeshStore
from rankmesh._stores.base import Text
from rankmesh._stores.commands import CommandStore, Refusing
from rankmesh.torch._errors import to_torch_error
from rankmesh_agent.wire.errors import DistError

P = ParamSpec("P")
T = TypeVar("T")

_AT_ONCE = timedelta(0)
_SHORTEST = timedelta(milliseconds=1)
_ENDLESS = timedelta(days=36500)


class Store(torch.distributed.Store):
    """A store of the mesh, for torch: whatever takes a ``torch.distributed.Store`` takes this one.

    ::

        torch.distributed.init_process_group("gloo", store=Store(rankmesh.FileStore(path)), rank=rank, world_size=size)

    Methods, results and errors are those of the mesh's store; the errors are torch's, too: a timeout is a
    ``rankmesh.StoreTimeoutError`` and a ``torch.distributed.DistStoreError``.

    The timeout is at first that of the mesh's store, and set from here afterwards: ``set_timeout``, or what torch sets
    by itself, becomes the timeout of the mesh's store with the next call that waits. As with torch's stores, a timeout
    of 0 is none: the wait has no end. A negative one is over at once.

    torch's groups and prefixes keep only the half of a store that is written in C++. So each store is kept here until
    it is closed, even if nobody else has it, and with it what the mesh's store has open: connections, a file, a port.

    Args:
        store: one of the mesh; by default that of the job this process is a rank of, then with a timeout of its own.

    Raises:
        TypeError: ``store`` is not a store of the mesh.
        ValueError: there is none given, and rankmesh.init_process_group has not been called.
    """

    def __init__(self, store: MeshStore | None = None) -> None:
        super().__init__()
        if store is None:
            store = _do(get_default_store().clone)
        elif not isinstance(store, MeshStore):
            hint = "; torch takes its own as they are" if isinstance(store, torch.distributed.Store) else ""
            raise TypeError(f"store must be one of rankmesh's stores, got {type(store).__qualname__}{hint}")
        self._mesh = store
        self.set_timeout(max(store.timeout, _SHORTEST))
        _kept.add(self)

    def close(self) -> None:
        """Let go of the mesh's store, which is closed if nobody else has it; calls after that fail.

        Close a store when no group of torch's uses it any more. Does nothing the second time.
        """
        if self in _kept:
            _kept.remove(self)
            self._mesh = CommandStore(Refusing(f"{self!r} is closed; make a new one"), self.timeout)

    # One key

    def set(self, key: str, value: Text) -> None:
        _do(self._mesh.set, key, value)

    def get(self, key: str) -> bytes:
        return _do(self._in_time().get, key)

    def add(self, key: str, amount: int) -> int:
        return _do(self._mesh.add, key, amount)

    def compare_set(self, key: str, expected_value: Text, desired_value: Text) -> bytes:
        return _do(self._mesh.compare_set, key, expected_value, desired_value)

    def append(self, key: str, value: Text) -> None:
        _do(self._mesh.append, key, value)

    def delete_key(self, key: str) -> bool:
        return _do(self._mesh.delete_key, key)

    # Several keys

    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        if timeout is None:
            _do(self._in_time().wait, keys)
        else:
            _do(self._mesh.wait, keys, _limit(timeout))

    def check(self, keys: Sequence[str]) -> bool:
        return _do(self._mesh.check, keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return _do(self._in_time().multi_get, keys)

    def multi_set(self, keys: Sequence[str], values: Sequence[Text]) -> None:
        _do(self._mesh.multi_set, keys, values)

    def num_keys(self) -> int:
        return _do(self._mesh.num_keys)

    def list_keys(self) -> list[str]:
        return _do(self._mesh.list_keys)

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815  # what torch's C++ calls them

    # Queues: torch's C++, and so its PrefixStore, does not ask for them, nor for the keys

    def queue_push(self, key: str, value: Text) -> None:
        _do(self._mesh.queue_push, key, value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return _do(self._in_time().queue_pop, key, block)

    def queue_len(self, key: str) -> int:
        return _do(self._mesh.queue_len, key)

    # All of it

    def clone(self) -> Store:
        twin = Store(_do(self._mesh.clone))
        twin.set_timeout(self.timeout)
        return twin

    def has_extended_api(self) -> bool:
        return self._mesh.has_extended_api()

    def _in_time(self) -> MeshStore:
        """Return the mesh's store with the timeout of today: torch keeps it in C++, and does not say when it is set."""
        limit = _limit(self.timeout)
        if self._mesh.timeout != limit:
            _do(self._mesh.set_timeout, limit)
        return self._mesh

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"cannot pickle {self!r}: make one in each process")

    def __repr__(self) -> str:
        return f"rankmesh.torch.Store({self._mesh!r})"


def fresh_job_store() -> torch.distributed.PrefixStore:
    """Return the job's own store for another default group of torch's: keys of an earlier one are not found there.

    All ranks ask for it equally often.
    """
    world = require_session()
    for left in [each for each in _of_sessions if each is not world]:
        _of_sessions.pop(left).close()  # only groups of a world that was left have it
    store = _of_sessions.get(world) or _of_sessions.setdefault(world, Store())
    return torch.distributed.PrefixStore(f"torch/{next(_rounds)}", store)


def _do(call: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    try:
        return call(*arguments, **options)
    except DistError as error:
        raise to_torch_error(error) from error.__cause__


def _limit(timeout: timedelta | float) -> timedelta:
    """Return the mesh's timeout that means what ``timeout``, a timedelta or seconds, means to torch."""
    given = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    return max(given, _AT_ONCE) if given else _ENDLESS


_rounds = itertools.count()
_kept: set[Store] = set()
_of_sessions: dict[Session, Store] = {}
