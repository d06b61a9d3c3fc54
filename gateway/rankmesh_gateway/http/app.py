"""ASGI application of the gateway."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.http.middleware import Application, SecurityMiddleware, role_table
from rankmesh_agent.http.server import create_application
from rankmesh_agent.net.host import host_id
from rankmesh_agent.wire.credentials import Credentials, Role
from rankmesh_gateway import dashboard
from rankmesh_gateway.diagnosis.service import DiagnosisService
from rankmesh_gateway.http import handlers
from rankmesh_gateway.http.asgi import GatewayApplication
from rankmesh_gateway.http.dashboard_sessions import DashboardSessions
from rankmesh_gateway.http.job_scope import confine
from rankmesh_gateway.snapshot import SnapshotCache
from rankmesh_gateway.state.job_stores import JobStores
from rankmesh_gateway.state.registry import Registry

_role_of = role_table(
    {
        Role.READ: r"GET /(metrics|openapi\.json"
        r"|v1/(jobs|ranks|agents|groups(/[^/]+(/inflight)?)?|waiting|snapshot|events|overview|rates|diagnosis))"
        r"|POST /v1/dashboard/(codes|sessions)"
    }
)
MAX_BODY_BYTES = 8 << 20
"""Limit of a request's body: the heartbeat of a rank in several groups of a large world."""


def create_app(
    registry: Registry | None = None,
    *,
    token: str | Credentials = "",
    names: Iterable[str] = (),
    stores: JobStores | None = None,
) -> SecurityMiddleware:
    """Return the gateway's ASGI application.

    Args:
        registry: the registry that it serves; a new one if left out.
        token: the secret that every request needs but health and the dashboard's page, which holds no data, or all
            credentials; empty for none.
        names: host names, besides addresses and localhost, that the Host header may have.
        stores: the jobs' stores, which another port serves; new ones if left out.
    """
    served = Registry() if registry is None else registry
    stores = JobStores(served, token) if stores is None else stores
    credentials = Credentials.of(token)
    sessions, services = DashboardSessions(credentials), create_services(served, credentials.run, stores)
    make_framework_app = partial(
        create_application,
        partial(create_framework_app, served, credentials.run, sessions=sessions, stores=stores, services=services),
    )
    app = GatewayApplication(services, make_framework_app, stores.drop_unused)
    return SecurityMiddleware(
        app,
        credentials,
        names,
        lambda method, path: MAX_BODY_BYTES,
        open_paths=dashboard.paths(),
        role_of=_role_of,
        translate=sessions.translate,
        confine=confine,
    )


def create_services(registry: Registry, token: str, stores: JobStores) -> handlers.Services:
    """Return what the endpoints are functions of.

    Args:
        registry: the registry.
        token: the secret for requests to agents.
        stores: the jobs' stores.
    """
    diagnosis = DiagnosisService(registry, token, host_id(Settings.from_env(os.environ).shm_dir))
    return handlers.Services(registry, diagnosis, SnapshotCache(registry, stores, diagnosis))


def create_framework_app(
    registry: Registry,
    token: str = "",
    *,
    sessions: DashboardSessions | None = None,
    stores: JobStores | None = None,
    services: handlers.Services | None = None,
) -> Application:
    """Return the application of all endpoints. Imports FastAPI and pydantic.

    Args:
        registry: the registry that it serves.
        token: the secret for its requests to agents.
        sessions: of the dashboard; new ones if left out.
        stores: the jobs' stores; new ones if left out.
        services: of the registry; new ones if left out.
    """
    from rankmesh_agent.http.application import ANY_REQUEST, WebApplication
    from rankmesh_gateway.clients.agent_client import AgentClient
    from rankmesh_gateway.clients.group_controller import GroupController
    from rankmesh_gateway.http.routes import agents, diagnosis, events, groups, health, membership, metrics
    from rankmesh_gateway.http.routes import dashboard as dashboard_routes
    from rankmesh_gateway.http.routes.dependencies import JOB_OF_BODY
    from rankmesh_gateway.http.routes.problems import problems

    app = WebApplication(
        "RankMesh gateway",
        "Who is in a job, in which groups, and how they are.",
        "gateway",
        handlers.problem_headers,
        responses=problems(*ANY_REQUEST),
        dependencies=[JOB_OF_BODY],
    )
    client = AgentClient(token)
    app.state.registry = registry
    app.state.stores = stores or JobStores(registry, token)
    app.state.services = services or create_services(registry, token, app.state.stores)
    app.state.controller = GroupController(registry, client)
    app.state.sessions = sessions or DashboardSessions(Credentials(token))
    for module in (health, metrics, membership, agents, groups, diagnosis, events, dashboard_routes):
        app.include_router(module.router)
    return app
