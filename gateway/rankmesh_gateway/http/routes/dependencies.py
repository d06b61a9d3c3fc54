"""Dependencies that FastAPI gives to the endpoints, and a parameter that several have."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Query, Request, Security
from fastapi.security import HTTPBearer

from rankmesh_agent.http.application import from_state
from rankmesh_agent.wire.credentials import Grant
from rankmesh_agent.wire.fields import MAX_NAME
from rankmesh_gateway.http.handlers import Services
from rankmesh_gateway.http.job_scope import check_body

ServicesDep = Annotated[Services, from_state("services")]
"""What the endpoints are functions of."""
JobName = Annotated[str | None, Query(max_length=MAX_NAME, description="Only this job; all when left out.")]


async def _check_job_of_body(request: Request) -> None:
    try:
        document = await request.json() if request.method == "POST" else None
    except ValueError:
        document = None
    check_body(request.scope, document.get("job") if isinstance(document, dict) else None)


def grant_of(request: Request) -> Grant:
    """Return the rights of a request's credential."""
    grant: Grant = request.state.grant
    return grant


JOB_OF_BODY = Depends(_check_job_of_body)
"""Rejects a body of another job than the credential's; a dependency of all endpoints."""

BEARER = Security(HTTPBearer(auto_error=False, description="The job's token; a gateway on loopback may have none."))
"""Declares the token in the OpenAPI document; SecurityMiddleware checks it."""
