"""Dependencies that FastAPI gives to the endpoints, and a parameter that several have."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request, Security
from fastapi.security import HTTPBearer

from rankmesh_agent.http.application import from_state
from rankmesh_agent.wire.credentials import Grant
from rankmesh_agent.wire.fields import MAX_NAME
from rankmesh_gateway.http.handlers import Services

ServicesDep = Annotated[Services, from_state("services")]
"""What the endpoints are functions of."""
JobName = Annotated[str | None, Query(max_length=MAX_NAME, description="Only this job; all when left out.")]


def grant_of(request: Request) -> Grant:
    """Return the rights of a request's credential."""
    grant: Grant = request.state.grant
    return grant


BEARER = Security(HTTPBearer(auto_error=False, description="The job's token; a gateway on loopback may have none."))
"""Declares the token in the OpenAPI document; SecurityMiddleware checks it."""
