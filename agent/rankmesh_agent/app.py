"""The agent's HTTP face as an ASGI application."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

from fastapi import FastAPI

from rankmesh_agent.routes import groups, health, problems, store
from rankmesh_agent.routes.view import AgentView
from rankmesh_agent.wire.guard import Guard
from rankmesh_agent.wire.version import __version__


def create_app(agent: AgentView, *, token: str = "", names: Iterable[str] = ()) -> Guard:
    """Return the ASGI application of an agent; when its server shuts it down, it closes the agent's store.

    Args:
        agent: whom it shows.
        token: the secret that everything but health asks for; empty for none.
        names: host names besides addresses and localhost under which it may be asked.
    """
    app = _Application(
        title="RankMesh agent",
        description="One rank of a job: how it is, the groups it is in, and the job's key-value store.",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
        lifespan=_closing_the_store,
    )
    app.state.agent = agent
    for routes in (health, groups, store):
        app.include_router(routes.router)
    problems.install(app)
    return Guard(app, token, names)


@contextlib.asynccontextmanager
async def _closing_the_store(app: FastAPI) -> AsyncIterator[None]:
    yield
    await app.state.agent.store.close()


class _Application(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """Return FastAPI's OpenAPI document, made once, with the problem responses as they are."""
        if self.openapi_schema is None:
            problems.use_media_type(super().openapi())
        return super().openapi()
