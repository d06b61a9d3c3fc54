"""What handlers are given besides the request."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer

from rankmesh_gateway.registry import Registry


async def _registry(request: Request) -> Registry:
    return cast(Registry, request.app.state.registry)


TheRegistry = Annotated[Registry, Depends(_registry)]
"""The registry the application was made with."""

BEARER = Security(HTTPBearer(auto_error=False, description="The job's token; a gateway on loopback may have none."))
"""Declares the token in the OpenAPI document; it is the guard around the application that asks for it."""
