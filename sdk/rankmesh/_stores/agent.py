"""The store of the job that this process is a rank of."""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import TYPE_CHECKING

from rankmesh._stores.base import DEFAULT_TIMEOUT
from rankmesh._stores.commands import CommandStore, UnusableStore
from rankmesh_agent.store import store as agent_store

if TYPE_CHECKING:
    from rankmesh_agent.agent import Agent
    from rankmesh_agent.remote.agent import RemoteAgent


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


_open: weakref.WeakSet[AgentStore] = weakref.WeakSet()


def move_stores(before: Agent | RemoteAgent, after: Agent | RemoteAgent) -> None:
    """Have the stores of an agent be those of the rank's agent in the next epoch."""
    for store in list(_open):
        if store._agent is before:
            store._move(after)
