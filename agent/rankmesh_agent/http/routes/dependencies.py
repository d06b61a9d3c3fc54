"""The agent's interfaces to the HTTP endpoints, and the dependencies by which FastAPI gives it to them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Annotated, Any, Protocol

from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.diagnostics.probe import Prober
from rankmesh_agent.group.flight_recorder import FlightRecorder
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.http.application import from_state
from rankmesh_agent.store.client import StoreClient
from rankmesh_agent.wire.credentials import Grant
from rankmesh_agent.wire.schemas import AgentHealth, AgentInfo, GroupInfo, GroupRequest, Lease, LeaseState, LeaseTerms
from rankmesh_agent.wire.stats import AgentStats


class AgentState(Protocol):
    """What the HTTP endpoints read of an agent, also of a free one: see Agent. No method blocks."""

    @property
    def settings(self) -> Settings: ...
    def health(self) -> AgentHealth: ...
    def ready(self) -> bool: ...
    def info(self) -> AgentInfo: ...
    def groups(self) -> list[GroupInfo]: ...
    @property
    def recorder(self) -> FlightRecorder: ...
    def stats(self) -> AgentStats: ...


class Groups(Protocol):
    """The groups of an agent that is in a job: see GroupRegistry. The methods that make and drop a group block."""

    def find(self, name: str) -> LocalCommunicator | None: ...
    def make_over_http(
        self, wanted: GroupRequest, timeout: float, begun: Callable[[LocalCommunicator], None]
    ) -> tuple[LocalCommunicator, bool]: ...
    def drop_over_http(self, group: LocalCommunicator) -> None: ...


class CurrentAgent(AgentState, Protocol):
    """An agent that is in a job: see Agent."""

    @property
    def store(self) -> StoreClient: ...
    @property
    def group_registry(self) -> Groups: ...
    @property
    def world(self) -> LocalCommunicator: ...


class AcquiredLease(Protocol):
    """A lease, and the Agent that joins a job for it: see ActiveLease."""

    lease: Lease
    joining: Future[Any]


class Leases(Protocol):
    """The lease of a standalone agent: see LeaseManager. The end of a lease blocks while the agent leaves the job."""

    @property
    def agent(self) -> CurrentAgent | None: ...
    def current(self, grant: Grant | None = None) -> CurrentAgent: ...
    def acquire(self, terms: LeaseTerms) -> AcquiredLease: ...
    def state(self) -> LeaseState: ...
    def release(self, lease_id: str, reason: str = "") -> bool: ...


async def current_agent(request: Request) -> Any:
    """Return the agent that is in a job; raise NotLeasedError, or ForbiddenJobError for another job's credential."""
    state, grant = request.app.state, grant_of(request)
    if grant is None and state.leases is None:
        return state.agent
    return (state.leases or state.agent).current(grant)


async def _agent_or_free(request: Request) -> Any:
    """Return the same, or a standalone agent that is free."""
    state = request.app.state
    if grant_of(request) is not None:
        return await current_agent(request)
    return state.agent if state.leases is None else state.leases.agent or state.agent


def grant_of(request: Request) -> Grant | None:
    """Return the credential of a request if it is that of one job, or of a lease; None for others."""
    grant: Grant | None = getattr(request.state, "grant", None)
    return None if grant is None or grant.job is None else grant


AgentDep = Annotated[CurrentAgent, Depends(current_agent)]
"""The agent, which is in a job."""
AgentStateDep = Annotated[AgentState, Depends(_agent_or_free)]
"""The agent, which may be free."""
LeasesDep = Annotated[Leases, from_state("leases")]
"""The lease of a standalone agent, whatever the request's credential permits."""
ProberDep = Annotated[Prober, from_state("prober")]


async def _store(agent: AgentDep) -> StoreClient:
    return agent.store


StoreDep = Annotated[StoreClient, Depends(_store)]

BEARER = Security(HTTPBearer(auto_error=False, description="The job's token; a job on loopback may have none."))
"""Declares the token in the OpenAPI document; SecurityMiddleware checks it."""
