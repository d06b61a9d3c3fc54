"""ASGI applications of an agent, and of a store without an agent."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable
from types import SimpleNamespace
from typing import Any

from fastapi import APIRouter, FastAPI

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.diagnostics.probe import Prober
from rankmesh_agent.http.application import WebApplication
from rankmesh_agent.http.middleware import SecurityMiddleware
from rankmesh_agent.http.routes import groups, health, introspection, lease, metrics, probe, store, tensors
from rankmesh_agent.http.routes.dependencies import AgentInterface
from rankmesh_agent.http.routes.group_calls import WaiterThreads
from rankmesh_agent.store.base import AsyncStore
from rankmesh_agent.wire.npy import MAX_HEADER


def create_app(
    agent: AgentInterface,
    *,
    token: str = "",
    names: Iterable[str] = (),
    leasable: bool = False,
    max_tensor: int = Settings.max_body,
) -> SecurityMiddleware:
    """Return the ASGI application of an agent; when its server shuts it down, it calls the agent's ``aclose``.

    Args:
        agent: the agent.
        token: the secret that every request but health needs; empty for none.
        names: host names, besides addresses and localhost, that the Host header may have.
        leasable: whether the agent is a standalone one, a LeasableAgent.
        max_tensor: most bytes of an array in a request or a response.
    """
    app = _AgentApplication(
        "RankMesh agent",
        "One rank of a job: how it is, its groups and its part in their calls, and the job's key-value store.",
        agent,
    )
    app.state.prober = Prober(lambda: agent.info().gateway, lambda: agent.settings, token)
    app.state.threads = WaiterThreads()
    app.state.max_tensor = max_tensor
    modules = [health, metrics, groups, tensors, introspection, store, probe, *([lease] if leasable else [])]
    return app.secured([module.router for module in modules], token, names, max_tensor)


def create_store_app(keys: AsyncStore, *, token: str = "", names: Iterable[str] = ()) -> SecurityMiddleware:
    """Return the ASGI application of a store alone, with the agent's store endpoints; it closes the store at the end.

    Args:
        keys: the store.
        token: the secret that every request but health needs; empty for none.
        names: host names, besides addresses and localhost, that the Host header may have.
    """
    app = _AgentApplication(
        "RankMesh store", "A key-value store that ranks share.", SimpleNamespace(store=keys, aclose=keys.close)
    )
    return app.secured([health.store_router, store.router], token, names)


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    await app.state.agent.aclose()


class _AgentApplication(WebApplication):
    def __init__(self, title: str, description: str, agent: Any) -> None:
        super().__init__(title, description, "agent", redirect_slashes=False, lifespan=_lifespan)
        self.state.agent = agent

    def secured(
        self, routers: Iterable[APIRouter], token: str, names: Iterable[str], max_tensor: int = 0
    ) -> SecurityMiddleware:
        """Add some routes, and return the application behind its security checks."""
        for router in routers:
            self.include_router(router)
        return SecurityMiddleware(self, token, names, large_body=max_tensor + MAX_HEADER, is_large=_may_carry_tensor)


def _may_carry_tensor(method: str, path: str) -> bool:
    return method == "POST" and path.startswith("/v1/groups/") and not path.endswith("/abort")
