"""A store in this process."""

from __future__ import annotations

from rankmesh._stores.base import DEFAULT_TIMEOUT
from rankmesh._stores.commands import CommandStore
from rankmesh_agent.store.store import LocalStore
from rankmesh_agent.store.table import Table


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
