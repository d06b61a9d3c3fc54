"""ASGI applications of an agent, and of a store without an agent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from fastapi import APIRouter

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.diagnostics.probe import Prober
from rankmesh_agent.http.application import ANY_REQUEST, WebApplication
from rankmesh_agent.http.middleware import Message, Policy, SecurityMiddleware, role_table
from rankmesh_agent.http.routes import groups, health, introspection, lease, metrics, probe, store, tensors
from rankmesh_agent.http.routes.dependencies import AgentState, Leases
from rankmesh_agent.http.routes.group_calls import CallSlots
from rankmesh_agent.http.routes.problems import problems
from rankmesh_agent.store.client import StoreClient
from rankmesh_agent.wire.credentials import Credentials, Grant, Role
from rankmesh_agent.wire.errors import NotLeasedError
from rankmesh_agent.wire.npy import MAX_HEADER
from rankmesh_agent.wire.schemas import MAX_BODY_BYTES

_READ = r"GET /(metrics|openapi\.json|v1/(info|groups(/[^/]+(/inflight)?)?|flight-recorder|host|probe))"
_STORE = r"[A-Z]+ /v1/store(/.*)?"
_TENSORS = r"POST /v1/groups/[^/]+/(?!abort$)[^/]+"
_LEASE_PATH = "/v1/lease"
_OF_THE_HOST = ("GET", "/v1/host"), ("GET", "/v1/probe")
"""Endpoints for ranks of any job at a free agent, to measure the path to it."""
_role_of = role_table({Role.READ: _READ, Role.USE: f"{_STORE}|{_TENSORS}"})
_leasable_role_of = role_table(
    {Role.READ: _READ, Role.USE: _STORE, Role.LEASE: rf"{_TENSORS}|(GET|DELETE) {_LEASE_PATH}"}
)


def create_app(
    agent: AgentState,
    *,
    token: str | Credentials = "",
    names: Iterable[str] = (),
    leases: Leases | None = None,
    max_tensor: int = Settings.max_body,
) -> SecurityMiddleware:
    """Return the ASGI application of an agent.

    Args:
        token: the secret that every request but health needs, or all credentials; empty for none.
        names: host names, besides addresses and localhost, that the Host header may have.
        leases: the lease of a standalone agent, which is ``agent`` while it is free.
        max_tensor: most bytes of an array in a request or a response.
    """
    modules = [health, metrics, groups, tensors, introspection, store, probe, *([lease] if leases is not None else [])]
    app = _create(
        "RankMesh agent",
        "One rank of a job: how it is, its groups and its part in their calls, and the job's key-value store.",
        [module.router for module in modules],
        agent,
        leases,
    )

    def state() -> AgentState:
        return agent if leases is None else leases.agent or agent

    app.state.prober = Prober(lambda: state().info().gateway, lambda: agent.settings, lambda: _token_of(state(), token))
    app.state.slots = CallSlots()
    app.state.max_tensor = max_tensor
    holder: Any = leases or agent

    def confine(scope: Message, grant: Grant) -> None:
        if leases is not None and scope["path"] == _LEASE_PATH:
            return  # its endpoints check the credential
        try:
            holder.current(grant)
        except NotLeasedError:
            if (scope["method"], scope["path"]) not in _OF_THE_HOST:
                raise

    def limit_of(method: str, path: str) -> int:
        carries_array = method == "POST" and path.startswith("/v1/groups/") and not path.endswith("/abort")
        return max_tensor + MAX_HEADER if carries_array else MAX_BODY_BYTES

    policy = Policy(limit_of=limit_of, role_of=_role_of if leases is None else _leasable_role_of, confine=confine)
    return SecurityMiddleware(app, token, names, policy)


def create_store_app(
    keys: StoreClient, *, token: str | Credentials = "", names: Iterable[str] = ()
) -> SecurityMiddleware:
    """Return the ASGI application of a store alone, with the agent's store endpoints; see ``create_app``."""
    served = SimpleNamespace(store=keys)
    routers = [health.store_router, store.router]
    app = _create("RankMesh store", "A key-value store that ranks share.", routers, served)
    return SecurityMiddleware(app, token, names, Policy(role_of=_role_of))


def _token_of(agent: AgentState, token: str | Credentials) -> str:
    """Return the credential by which an agent knows those of its job."""
    return replace(Credentials.of(token), job=agent.info().job).of_own_job


def _create(
    title: str, description: str, routers: Iterable[APIRouter], agent: Any, leases: Leases | None = None
) -> WebApplication:
    app = WebApplication(title, description, "agent", redirect_slashes=False, responses=problems(*ANY_REQUEST))
    app.state.agent, app.state.leases = agent, leases
    for router in routers:
        app.include_router(router)
    return app
