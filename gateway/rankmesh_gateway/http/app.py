"""ASGI application of the gateway."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.http.middleware import Application, Policy, SecurityMiddleware
from rankmesh_agent.http.server import create_application
from rankmesh_agent.net.host import host_id
from rankmesh_agent.wire.credentials import Credentials
from rankmesh_gateway import dashboard
from rankmesh_gateway.clients.agent_client import AgentClient
from rankmesh_gateway.clients.group_controller import GroupController
from rankmesh_gateway.diagnosis.service import DiagnosisService
from rankmesh_gateway.http import handlers
from rankmesh_gateway.http.asgi import GatewayApplication
from rankmesh_gateway.http.dashboard_sessions import DashboardSessions
from rankmesh_gateway.http.endpoints import ENDPOINTS, confine, role_of
from rankmesh_gateway.snapshot import SnapshotCache
from rankmesh_gateway.state.job_stores import JobStores
from rankmesh_gateway.state.registry import Registry

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
        token: the secret that every request needs but health and the dashboard's page, or all credentials.
        names: host names, besides addresses and localhost, that the Host header may have.
    """
    served = Registry() if registry is None else registry
    services = create_services(served, token, stores)
    return SecurityMiddleware(
        GatewayApplication(services, partial(create_application, partial(create_framework_app, services))),
        token,
        names,
        Policy(lambda method, path: MAX_BODY_BYTES, dashboard.paths(), role_of, services.sessions.translate, confine),
    )


def create_services(
    registry: Registry, token: str | Credentials = "", stores: JobStores | None = None
) -> handlers.Services:
    """Return what the endpoints are functions of; see ``create_app``."""
    credentials = Credentials.of(token)
    stores = JobStores(registry, credentials) if stores is None else stores
    diagnosis = DiagnosisService(registry, credentials.run, host_id(Settings.from_env(os.environ).shm_dir))
    return handlers.Services(
        registry,
        stores,
        diagnosis,
        SnapshotCache(registry, stores, diagnosis),
        GroupController(registry, AgentClient(credentials.run)),
        DashboardSessions(credentials),
    )


def create_framework_app(services: handlers.Services) -> Application:
    """Return the application of all endpoints. Imports FastAPI and pydantic."""
    from rankmesh_agent.http.application import ANY_REQUEST, WebApplication
    from rankmesh_gateway.http.handled import add_handled_routes, problems

    app = WebApplication(
        "RankMesh gateway",
        "Who is in a job, in which groups, and how they are.",
        "gateway",
        handlers.problem_headers,
        bodies=[each.body for each in ENDPOINTS if each.body is not None],
        responses=problems(*ANY_REQUEST),
    )
    app.state.services = services
    add_handled_routes(app)
    return app
