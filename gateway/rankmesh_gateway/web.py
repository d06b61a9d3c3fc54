"""The gateway's endpoints as a web application, with all that comes with a framework."""

from __future__ import annotations

from rankmesh_agent.web import WebApplication
from rankmesh_agent.wire.errors import DistError
from rankmesh_gateway import answers
from rankmesh_gateway.checks import InvalidRequestError
from rankmesh_gateway.registry import Registry
from rankmesh_gateway.routes import agents, health, membership


def create_web(registry: Registry) -> WebApplication:
    """Return the application.

    Args:
        registry: what it serves.
    """
    app = WebApplication(
        "RankMesh gateway",
        "Who is in a job, in which groups, and how they are.",
        "gateway",
        (DistError, InvalidRequestError),
        answers.refusal,
    )
    app.state.registry = registry
    app.include_router(health.router)
    app.include_router(membership.router)
    app.include_router(agents.router)
    return app
