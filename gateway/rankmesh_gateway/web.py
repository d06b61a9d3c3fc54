"""The gateway's endpoints as a web application, with all that comes with a framework."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from rankmesh_agent.wire.version import __version__
from rankmesh_gateway.registry import Registry
from rankmesh_gateway.routes import health, membership, problems


def create_web(registry: Registry) -> FastAPI:
    """Return the application.

    Args:
        registry: what it serves.
    """
    app = _Application(
        title="RankMesh gateway",
        description="Who is in a job, in which groups, and how they are.",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.registry = registry
    app.include_router(health.router)
    app.include_router(membership.router)
    problems.install(app)
    return app


class _Application(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """Return FastAPI's OpenAPI document, made once, with the problem responses as they are."""
        if self.openapi_schema is None:
            problems.use_media_type(super().openapi())
        return super().openapi()
