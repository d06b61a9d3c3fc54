"""What handlers are given besides the request."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer

from rankmesh_gateway.clients.group_controller import Fleet
from rankmesh_gateway.snapshot import Overviews
from rankmesh_gateway.state.registry import Registry


async def _registry(request: Request) -> Registry:
    return cast(Registry, request.app.state.registry)


async def _overviews(request: Request) -> Overviews:
    return cast(Overviews, request.app.state.overviews)


async def _fleet(request: Request) -> Fleet:
    return cast(Fleet, request.app.state.fleet)


TheRegistry = Annotated[Registry, Depends(_registry)]
"""The registry the application was made with."""
TheOverviews = Annotated[Overviews, Depends(_overviews)]
"""What puts together all that there is to see."""
TheFleet = Annotated[Fleet, Depends(_fleet)]
"""What has the agents of groups do something."""

BEARER = Security(HTTPBearer(auto_error=False, description="The job's token; a gateway on loopback may have none."))
"""Declares the token in the OpenAPI document; it is the guard around the application that asks for it."""
