"""Stores that carry out their methods by commands to a table, local or remote."""

from __future__ import annotations

import os
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from rankmesh._stores.base import DEFAULT_TIMEOUT, Store
from rankmesh._stores.methods import Method
from rankmesh_agent.store import store as agent_store
from rankmesh_agent.store.command import Command
from rankmesh_agent.store.store import LocalStore
from rankmesh_agent.store.table import Table
from rankmesh_agent.wire.errors import (
    DistStoreError,
    KeyNotFoundError,
    QueueEmptyError,
    StoreTimeoutError,
    StoreUnresponsiveError,
)

if TYPE_CHECKING:
    from rankmesh_agent.agent import Agent
    from rankmesh_agent.remote.agent import RemoteAgent

_MIN_SECONDS = 1.0
"""Least time limit of a call that does not wait: a shorter timeout is meant for keys that may be missing."""

T = TypeVar("T")


class CommandStore(Store):
    """A store that executes commands on a store of the agent, local or remote.

    Args:
        store: executes the commands. It is closed with this object, when that is collected, or at exit.
        timeout: default time limit of calls: of the waits for keys, and of a remote owner's response.
    """

    _store: agent_store.Store
    _finalizer: weakref.finalize[[], CommandStore]

    def __init__(self, store: agent_store.Store, timeout: timedelta) -> None:
        self._timeout = timeout
        self._use(store)
        _stores.add(self)

    def close(self) -> None:
        """Release connections, files and the server; calls after that fail. Does nothing the second time."""
        self._finalizer()
        self._store = UnusableStore(f"{self!r} is closed; make a new one")

    def has_extended_api(self) -> bool:
        return True

    def _call(self, method: Method[T], *arguments: Any) -> T:
        command = method.command
        if not method.waits:
            return self._store.execute(command(*arguments), self._response_seconds())
        limit = arguments[1] if len(arguments) > 1 else True  # the timeout of wait(), or block of queue_pop()
        if limit is False:
            return self._store.execute(command(arguments[0]), self._response_seconds())
        seconds: float = (self._timeout if limit is True else limit).total_seconds()
        try:
            return self._store.execute(command(arguments[0], seconds))
        except (KeyNotFoundError, StoreTimeoutError, QueueEmptyError) as error:
            if error.ranks or isinstance(error, StoreUnresponsiveError):
                raise
            raise StoreTimeoutError(f"{self!r}: waited {seconds:g} s, but {error.message}") from None

    def _after_fork(self) -> None:
        """In a forked child: leave the parent's connections and files to the parent."""
        self._finalizer.detach()

    def _use(self, store: agent_store.Store) -> None:
        """Execute commands on a store from now on, and close it with this object."""
        self._store = store
        self._finalizer = weakref.finalize(self, store.close)

    def _response_seconds(self) -> float:
        """Return the time limit of a call that does not wait."""
        return max(self._timeout.total_seconds(), _MIN_SECONDS)


class UnusableStore(agent_store.Store):
    """Stands in for a store that is closed, or belongs to another process."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def execute(self, command: Command[T], timeout: float | None = None) -> T:
        raise DistStoreError(self._reason)


class HashStore(CommandStore):
    """A store for the threads of one process; other processes do not see its keys."""

    def __init__(self) -> None:
        super().__init__(LocalStore(Table()), DEFAULT_TIMEOUT)

    def clone(self) -> HashStore:
        found = HashStore()
        found._store, found._timeout = self._store, self._timeout
        return found

    def __repr__(self) -> str:
        return "HashStore()"


class AgentStore(CommandStore):
    """The keys that all agents of a job serve under ``/v1/store``; ``timeout``: default time limit of calls."""

    def __init__(self, agent: Agent | RemoteAgent, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        self._agent = agent
        super().__init__(agent.store, timeout)
        _open.add(self)

    def clone(self) -> AgentStore:
        return AgentStore(self._agent, self.timeout)

    def _move(self, agent: Agent | RemoteAgent) -> None:
        """Use the store of another epoch from now on, unless this one is closed."""
        if self._finalizer.alive:
            self._finalizer()
            self._agent = agent
            self._use(agent.store)

    def _use(self, store: agent_store.Store) -> None:
        self._store = store
        self._finalizer = weakref.finalize(self, bool)  # the agent closes it

    def _after_fork(self) -> None:
        super()._after_fork()
        self._use(UnusableStore(f"{self!r} belongs to the process that was forked, which is the rank"))

    def __repr__(self) -> str:
        return f"the store of rank {self._agent.member.rank}'s job"


_stores: weakref.WeakSet[CommandStore] = weakref.WeakSet()
_open: weakref.WeakSet[AgentStore] = weakref.WeakSet()


def move_stores(before: Agent | RemoteAgent, after: Agent | RemoteAgent) -> None:
    """Have the stores of an agent be those of the rank's agent in the next epoch."""
    for store in list(_open):
        if store._agent is before:
            store._move(after)


def _after_fork() -> None:
    for store in list(_stores):
        store._after_fork()


os.register_at_fork(after_in_child=_after_fork)
