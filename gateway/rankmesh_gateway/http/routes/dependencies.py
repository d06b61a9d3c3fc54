"""Dependencies that FastAPI gives to the endpoints, and a parameter that several have."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Security
from fastapi.security import HTTPBearer

from rankmesh_agent.http.application import from_state
from rankmesh_agent.wire.fields import MAX_NAME
from rankmesh_gateway.clients.group_controller import GroupController
from rankmesh_gateway.diagnosis.service import DiagnosisService
from rankmesh_gateway.http.dashboard_sessions import DashboardSessions
from rankmesh_gateway.snapshot import SnapshotCache
from rankmesh_gateway.state.registry import Registry

RegistryDep = Annotated[Registry, from_state("registry")]
"""The registry that the application serves."""
SnapshotDep = Annotated[SnapshotCache, from_state("snapshots")]
"""The application's snapshots."""
DiagnosisDep = Annotated[DiagnosisService, from_state("diagnosis")]
"""The application's diagnoses."""
ControllerDep = Annotated[GroupController, from_state("controller")]
"""The application's controller of groups."""
SessionsDep = Annotated[DashboardSessions, from_state("sessions")]
"""The sessions of the dashboard."""
JobName = Annotated[str | None, Query(max_length=MAX_NAME, description="Only this job; all when left out.")]

BEARER = Security(HTTPBearer(auto_error=False, description="The job's token; a gateway on loopback may have none."))
"""Declares the token in the OpenAPI document; SecurityMiddleware checks it."""
