"""Dependencies that FastAPI gives to the endpoints."""

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
"""The registry that the application serves."""
SnapshotDep = Annotated[SnapshotCache, Depends(_snapshots)]
"""The application's snapshots."""
ControllerDep = Annotated[GroupController, Depends(_controller)]
"""The application's controller of groups."""

BEARER = Security(HTTPBearer(auto_error=False, description="The job's token; a gateway on loopback may have none."))
"""Declares the token in the OpenAPI document; SecurityMiddleware checks it."""
