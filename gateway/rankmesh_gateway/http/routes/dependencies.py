"""What handlers are given besides the request."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer

from rankmesh_gateway.clients.group_controller import GroupController
from rankmesh_gateway.snapshot import SnapshotCache
from rankmesh_gateway.state.registry import Registry


async def _registry(request: Request) -> Registry:
    return cast(Registry, request.app.state.registry)


async def _snapshots(request: Request) -> SnapshotCache:
    return cast(SnapshotCache, request.app.state.snapshots)


async def _controller(request: Request) -> GroupController:
    return cast(GroupController, request.app.state.controller)


RegistryDep = Annotated[Registry, Depends(_registry)]
"""The registry the application was made with."""
SnapshotDep = Annotated[SnapshotCache, Depends(_snapshots)]
"""What puts together all that there is to see."""
ControllerDep = Annotated[GroupController, Depends(_controller)]
"""What has the agents of groups do something."""

BEARER = Security(HTTPBearer(auto_error=False, description="The job's token; a gateway on loopback may have none."))
"""Declares the token in the OpenAPI document; it is the guard around the application that asks for it."""
