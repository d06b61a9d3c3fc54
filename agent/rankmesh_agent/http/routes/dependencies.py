"""What the HTTP endpoints need of an agent, and how they come by it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Annotated, Protocol, cast

from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.store.base import AsyncStore
from rankmesh_agent.wire.schemas import (
    AgentHealth,
    AgentInfo,
    FlightRecord,
    GroupInfo,
    GroupRequest,
    HostReport,
    InFlight,
    Lease,
    LeaseState,
    LeaseTerms,
    ProbeReply,
    ProbeRequest,
)
from rankmesh_agent.wire.stats import AgentStats


class AgentView(Protocol):
    """An agent as its HTTP face sees it. Its methods do not block, but for those that say so."""

    @property
    def settings(self) -> Settings:
        """What the environment said."""

    @property
    def store(self) -> AsyncStore:
        """The job's store: the agent's own, or one that asks the owner."""

    def health(self) -> AgentHealth:
        """Return whether the agent can do its work, and if not, why."""

    def ready(self) -> bool:
        """Return whether the rank takes part in its job: it has joined, its groups work, and it is not leaving."""

    def info(self) -> AgentInfo:
        """Return who the agent is."""

    def groups(self) -> list[GroupInfo]:
        """Return the groups the rank is a member of."""

    def group(self, name: str) -> LocalCommunicator | None:
        """Return the group of an id (16 hexadecimal digits) or name, None if the rank is in none."""

    def make_group(
        self, wanted: GroupRequest, begun: Callable[[LocalCommunicator], None]
    ) -> tuple[LocalCommunicator, bool]:
        """Make a group that is asked for over HTTP. Blocks until its members have met; to be called in a thread.

        Args:
            wanted: the group.
            begun: is given the group before it waits for the members; aborting it ends that.

        Returns:
            The group, and whether it is new: not if this very one, by its instance, was there.

        Raises:
            GroupExistsError: another group has the name.
            DistBackendError: a member did not come, or failed.
        """

    def delete_group(self, group: LocalCommunicator) -> None:
        """End a group at this rank. May block for a while; to be called in a thread.

        Raises:
            GroupInUseError: it was not made over HTTP.
        """

    def in_flight(self, group: str) -> list[InFlight] | None:
        """Return a group's operations in flight; None if there is no group with this name or id."""

    def flight_records(self, group: str | None, last: int | None) -> list[FlightRecord]:
        """Return what is remembered of the latest operations: of one group or all, so many or all."""

    def vitals(self) -> AgentStats:
        """Return what has been counted."""

    async def aclose(self) -> None:
        """Let go of what was used in this event loop, which ends."""


class LeaseManager(Protocol):
    """A standalone agent as its lease's endpoints see it. The methods do not block, but for ``release``."""

    def acquire_in_background(self, wanted: LeaseTerms) -> tuple[Lease, Future[Lease]]:
        """Take the agent; return the lease, and a future that is done when the world is complete or the join failed.

        Raises:
            AgentTakenError: somebody else has it.
        """

    def lease_state(self) -> LeaseState:
        """Return the lease, and how far it is.

        Raises:
            NotLeasedError: the agent is free.
        """

    def release(self, lease_id: str, reason: str) -> bool:
        """End a lease, and return whether there was one of that id; blocks while the agent leaves the job."""


class Probing(Protocol):
    """What measures the ways between agents. The methods block: they are for threads."""

    def host(self) -> HostReport:
        """Return what this host has."""

    def probe(self, asked: ProbeRequest) -> ProbeReply:
        """Measure the way to another agent.

        Raises:
            AddressNotListedError: the gateway does not list the address.
            DistNetworkError: the gateway cannot be asked.
        """


async def _probing(request: Request) -> Probing:
    return cast(Probing, request.app.state.probing)


TheProbing = Annotated[Probing, Depends(_probing)]
"""What measures, from the agent that the application was made for."""


async def _lease_manager(request: Request) -> LeaseManager:
    return cast(LeaseManager, request.app.state.lease_manager)


TheLeaseManager = Annotated[LeaseManager, Depends(_lease_manager)]
"""The standalone agent the application was made for."""


async def _agent(request: Request) -> AgentView:
    return cast(AgentView, request.app.state.agent)


async def _store(request: Request) -> AsyncStore:
    return (await _agent(request)).store


TheAgent = Annotated[AgentView, Depends(_agent)]
"""The agent the application was made for."""

TheStore = Annotated[AsyncStore, Depends(_store)]
"""The store of that agent."""

BEARER = Security(HTTPBearer(auto_error=False, description="The job's token; a job on loopback may have none."))
"""Declares the token in the OpenAPI document; it is the guard around the application that asks for it."""
