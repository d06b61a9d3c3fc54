"""The gateway's endpoints as a web application, with all that comes with a framework."""

from __future__ import annotations

from rankmesh_agent.http.application import WebApplication
from rankmesh_agent.wire.errors import DistError
from rankmesh_gateway.clients.agent_client import Members
from rankmesh_gateway.clients.group_controller import Fleet
from rankmesh_gateway.clients.store_keys import Stores
from rankmesh_gateway.http import handlers
from rankmesh_gateway.http.routes import agents, dashboard, events, groups, health, membership, metrics
from rankmesh_gateway.snapshot import Overviews
from rankmesh_gateway.state.registry import Registry
from rankmesh_gateway.state.validation import InvalidRequestError


def create_web(registry: Registry, token: str = "") -> WebApplication:
    """Return the application.

    Args:
        registry: what it serves.
        token: the secret with which it asks agents.
    """
    app = WebApplication(
        "RankMesh gateway",
        "Who is in a job, in which groups, and how they are.",
        "gateway",
        (DistError, InvalidRequestError),
        handlers.refusal,
    )
    members = Members(token)
    app.state.registry = registry
    app.state.overviews = Overviews(registry, Stores(registry, members))
    app.state.fleet = Fleet(registry, members)
    for module in (health, metrics, membership, agents, groups, events, dashboard):
        app.include_router(module.router)
    return app
