"""The HTTP faces of an agent, and of a store on its own, as ASGI applications."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

from fastapi import FastAPI

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.diagnostics.probe import Prober
from rankmesh_agent.http.application import WebApplication
from rankmesh_agent.http.middleware import Guard
from rankmesh_agent.http.routes import (
    groups,
    health,
    introspection,
    lease,
    metrics,
    probe,
    store,
    store_health,
    tensors,
)
from rankmesh_agent.http.routes.dependencies import AgentView, LeaseManager
from rankmesh_agent.http.routes.group_calls import Threads
from rankmesh_agent.store.base import AsyncStore
from rankmesh_agent.wire.npy import MAX_HEADER


def create_app(
    agent: AgentView,
    *,
    token: str = "",
    names: Iterable[str] = (),
    lease_manager: LeaseManager | None = None,
    max_tensor: int = Settings.max_body,
) -> Guard:
    """Return the ASGI application of an agent; when its server shuts it down, it calls the agent's ``aclose``.

    Args:
        agent: whom it shows.
        token: the secret that everything but health asks for; empty for none.
        names: host names besides addresses and localhost under which it may be asked.
        lease_manager: who leases the agent, if it is a standalone one.
        max_tensor: most bytes of an array that comes or goes.
    """
    app = _Application(
        "RankMesh agent",
        "One rank of a job: how it is, its groups and its part in their calls, and the job's key-value store.",
        agent,
    )
    app.state.lease_manager = lease_manager
    app.state.probing = Prober(lambda: agent.info().gateway, lambda: agent.settings, token)
    app.state.threads = Threads()
    app.state.max_tensor = max_tensor
    modules = [
        health,
        metrics,
        groups,
        tensors,
        introspection,
        store,
        probe,
        *([lease] if lease_manager is not None else []),
    ]
    return app.guarded(modules, token, names, max_tensor)


def create_store_app(keys: AsyncStore, *, token: str = "", names: Iterable[str] = ()) -> Guard:
    """Return the ASGI application of a store, the agent's endpoints for it without an agent; closes it in the end.

    Args:
        keys: what it serves.
        token: the secret that everything but health asks for; empty for none.
        names: host names besides addresses and localhost under which it may be asked.
    """
    served = SimpleNamespace(store=keys, aclose=keys.close)
    app = _Application("RankMesh store", "A key-value store that ranks share.", served)
    return app.guarded((store_health, store), token, names)


@contextlib.asynccontextmanager
async def _closing(app: FastAPI) -> AsyncIterator[None]:
    yield
    await app.state.agent.aclose()


class _Application(WebApplication):
    def __init__(self, title: str, description: str, agent: Any) -> None:
        super().__init__(title, description, "agent", redirect_slashes=False, lifespan=_closing)
        self.state.agent = agent

    def guarded(self, modules: Iterable[ModuleType], token: str, names: Iterable[str], max_tensor: int = 0) -> Guard:
        """Return the application with the routes of some modules, behind the guard."""
        for routes in modules:
            self.include_router(routes.router)
        return Guard(self, token, names, large_body=max_tensor + MAX_HEADER, is_large=_carries_a_tensor)


def _carries_a_tensor(method: str, path: str) -> bool:
    return method == "POST" and path.startswith("/v1/groups/") and not path.endswith("/abort")
