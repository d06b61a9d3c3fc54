"""The gateway as an ASGI application."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI

from rankmesh_agent.wire.guard import Guard
from rankmesh_agent.wire.version import __version__
from rankmesh_gateway.registry import Registry
from rankmesh_gateway.routes import health, membership, problems

MAX_BODY_BYTES = 8 << 20
"""Largest request body: a heartbeat that lists the ranks of several groups of a large world."""


def create_app(registry: Registry | None = None, *, token: str = "", names: Iterable[str] = ()) -> Guard:
    """Return the gateway's ASGI application.

    Args:
        registry: what it serves; a new one when left out.
        token: the secret that everything but health asks for; empty for none.
        names: host names besides addresses and localhost under which it may be asked.
    """
    app = _Application(
        title="RankMesh gateway",
        description="Who is in a job, in which groups, and how they are.",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.registry = Registry() if registry is None else registry
    app.include_router(health.router)
    app.include_router(membership.router)
    problems.install(app)
    return Guard(app, token, names, MAX_BODY_BYTES)


class _Application(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """Return FastAPI's OpenAPI document, made once, with the problem responses as they are."""
        if self.openapi_schema is None:
            problems.use_media_type(super().openapi())
        return super().openapi()
