"""The agent's interface to the HTTP endpoints, and the dependencies by which FastAPI gives it to them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Annotated, Any, Protocol

from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.diagnostics.probe import Prober
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.http.application import from_state
from rankmesh_agent.store.async_store import AsyncStore
from rankmesh_agent.wire.credentials import Grant
from rankmesh_agent.wire.schemas import (
    AgentHealth,
    AgentInfo,
    FlightRecord,
    GroupInfo,
    GroupRequest,
    InFlight,
    Lease,
    LeaseState,
    LeaseTerms,
)
from rankmesh_agent.wire.stats import AgentStats


class AgentInterface(Protocol):
    """An agent, as the HTTP endpoints see it. No method blocks, but for those whose text says so."""

    @property
    def settings(self) -> Settings:
        """The process's settings."""

    @property
    def store(self) -> AsyncStore:
        """The job's store."""

    def confined(self, grant: Grant) -> AgentInterface:
        """Return the agent as the holder of a job's or a lease's credential may use it: the job's, even if it changes.

        Raises:
            ForbiddenJobError: the agent is in another job, or leased for another rank.
            NotLeasedError: the agent is in no job.
        """

    def health(self) -> AgentHealth:
        """Return whether the agent can do its work, and if not, why."""

    def ready(self) -> bool:
        """Return whether the rank takes part in its job: it has joined, its groups work, and it is not leaving."""

    def info(self) -> AgentInfo:
        """Return the agent's rank, job, addresses and version."""

    def groups(self) -> list[GroupInfo]:
        """Return the groups the rank is a member of."""

    def group(self, name: str) -> LocalCommunicator | None:
        """Return the group of an id (16 hexadecimal digits) or name, None if the rank is in none."""

    def make_group(
        self, wanted: GroupRequest, begun: Callable[[LocalCommunicator], None]
    ) -> tuple[LocalCommunicator, bool]:
        """Create a group that is requested over HTTP. Blocks until its members have met; to be called in a thread.

        Args:
            wanted: the group.
            begun: is given the group before it waits for the members; aborting the group ends the wait.

        Returns:
            The group, and whether it is new: not if this very one, by its instance, exists.

        Raises:
            GroupExistsError: another group has the name.
            DistBackendError: a member did not come, or failed.
        """

    def delete_group(self, group: LocalCommunicator) -> None:
        """End a group at this rank. May block for a while; to be called in a thread.

        Raises:
            GroupInUseError: the group was not made over HTTP.
        """

    def in_flight(self, group: str) -> list[InFlight] | None:
        """Return a group's operations in flight; None if there is no group with this name or id."""

    def flight_records(self, group: str | None, last: int | None) -> list[FlightRecord]:
        """Return the ``last`` recorded operations, or all, of one group or of all."""

    def vitals(self) -> AgentStats:
        """Return the agent's counters."""


class LeasableAgent(AgentInterface, Protocol):
    """A standalone agent, as the HTTP endpoints see it."""

    def acquire(self, wanted: LeaseTerms) -> tuple[Lease, Future[Any]]:
        """Acquire the agent.

        Returns:
            The lease, and a future that is done when the world is complete or the join failed.

        Raises:
            AgentTakenError: the agent is leased already.
        """

    def lease_state(self) -> LeaseState:
        """Return the lease, and whether it has joined its job.

        Raises:
            NotLeasedError: the agent is free.
        """

    def release(self, lease_id: str, reason: str) -> bool:
        """End a lease, and return whether there was one of that id. Blocks while the agent leaves the job."""


async def _agent(request: Request) -> Any:
    agent: AgentInterface = request.app.state.agent
    grant = grant_of(request)
    return agent if grant is None else agent.confined(grant)


def grant_of(request: Request) -> Grant | None:
    """Return the credential of a request if it is that of one job, or of a lease; None for others."""
    grant: Grant | None = getattr(request.state, "grant", None)
    return None if grant is None or grant.job is None else grant


AgentDep = Annotated[AgentInterface, Depends(_agent)]
"""The agent that the application was created for, or its part that the request's credential permits."""
LeasableAgentDep = Annotated[LeasableAgent, from_state("agent")]
"""The same, a standalone one, whatever the request's credential permits: for the lease alone."""
ProberDep = Annotated[Prober, from_state("prober")]
"""The prober of that agent."""


async def _store(agent: AgentDep) -> AsyncStore:
    return agent.store


StoreDep = Annotated[AsyncStore, Depends(_store)]
"""The store of that agent."""

BEARER = Security(HTTPBearer(auto_error=False, description="The job's token; a job on loopback may have none."))
"""Declares the token in the OpenAPI document; SecurityMiddleware checks it."""
