"""Dependencies that FastAPI gives to the endpoints, and a parameter that several have."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Query, Request, Security
from fastapi.security import HTTPBearer

from rankmesh_agent.http.application import from_state
from rankmesh_agent.wire.credentials import Grant
from rankmesh_agent.wire.fields import MAX_NAME
from rankmesh_gateway.clients.group_controller import GroupController
from rankmesh_gateway.http.dashboard_sessions import DashboardSessions
from rankmesh_gateway.http.handlers import Services
from rankmesh_gateway.http.job_scope import check_body
from rankmesh_gateway.state.job_stores import JobStores
from rankmesh_gateway.state.registry import Registry

RegistryDep = Annotated[Registry, from_state("registry")]
"""The registry that the application serves."""
StoresDep = Annotated[JobStores, from_state("stores")]
"""The jobs' stores."""
ServicesDep = Annotated[Services, from_state("services")]
"""What the handlers are functions of."""
ControllerDep = Annotated[GroupController, from_state("controller")]
"""The application's controller of groups."""
SessionsDep = Annotated[DashboardSessions, from_state("sessions")]
"""The sessions of the dashboard."""
JobName = Annotated[str | None, Query(max_length=MAX_NAME, description="Only this job; all when left out.")]


async def _job_of_body(request: Request) -> str | None:
    """Return the job that a request with a body is restricted to, once the body names it."""
    try:
        document = await request.json() if request.method == "POST" else None
    except ValueError:
        document = None
    return check_body(request.scope, document.get("job") if isinstance(document, dict) else None)


def grant_of(request: Request) -> Grant:
    """Return the rights of a request's credential."""
    grant: Grant = request.state.grant
    return grant


JOB_OF_BODY = Depends(_job_of_body)
"""Rejects a body of another job than the credential's; a dependency of all endpoints."""
JobOfBody = Annotated[str | None, JOB_OF_BODY]
"""The job that a request with a body is restricted to; None for all."""

BEARER = Security(HTTPBearer(auto_error=False, description="The job's token; a gateway on loopback may have none."))
"""Declares the token in the OpenAPI document; SecurityMiddleware checks it."""
