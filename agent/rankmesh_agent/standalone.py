"""A standalone agent: one HTTP server, and an Agent behind it for as long as somebody has leased it.

Who leases it, an SDK process that attaches or somebody with curl, has it join a job as one rank. To its peers it is an
agent like any other. When the lease ends it leaves the job and is free for the next.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from rankmesh_agent.agent import Agent
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.http.server import ConnectionHandler, HttpServer
from rankmesh_agent.membership.gateway_client import GatewayClient
from rankmesh_agent.membership.heartbeat import HeartbeatThread
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.remote.server import SessionServer
from rankmesh_agent.store.base import AsyncStore
from rankmesh_agent.transports import shared_memory
from rankmesh_agent.wire import attach_frames, store_frames
from rankmesh_agent.wire.errors import AgentTakenError, LeaseEndedError, NotLeasedError
from rankmesh_agent.wire.schemas import (
    FAILED_SECONDS,
    UNASSIGNED,
    AgentHealth,
    AgentHeartbeat,
    AgentInfo,
    AgentLeave,
    FlightRecord,
    GroupInfo,
    GroupRequest,
    InFlight,
    Lease,
    LeaseState,
    LeaseTerms,
    Leave,
    Member,
)
from rankmesh_agent.wire.stats import AgentStats
from rankmesh_agent.wire.upgrade import Upgrade
from rankmesh_agent.wire.version import __version__

_log = logging.getLogger("rankmesh")

_GC_PASSES = 2
"""Signs of life after a lease at which its memory is given back: at the first, its threads may still end."""

_ANY_EPOCH = 1


class _ActiveLease:
    """A lease, and the Agent that came of it."""

    def __init__(self, wanted: LeaseTerms, lease_id: str) -> None:
        self.lease = Lease(lease_id, wanted.job, wanted.rank, wanted.world_size, wanted.holder)
        self.instance = secrets.token_hex(16)
        self.joining = Deadline(wanted.timeout)
        self.idle = wanted.idle
        self.used = time.monotonic()
        self.agent: Agent | None = None
        self.ended: str | None = None
        """Why it ended; None while it lasts."""


class Standalone:
    """A standalone agent, from the first sign of life to the goodbye.

    Args:
        settings: what the environment says.
        find_gateway: returns the gateway's URL, None while it is not known.
        host: address to listen on.
        port: 0 for any free one.
        name: for people, and for the order in which agents are leased; the host's name if empty.
        urls: more base URLs under which clients can reach it: ports that are published elsewhere.

    Raises:
        ValueError: others could reach it, and there is no token.
        AddressInUseError: somebody else listens there.
    """

    def __init__(
        self,
        settings: Settings,
        find_gateway: Callable[[], str | None],
        *,
        host: str,
        port: int = 0,
        name: str = "",
        urls: Sequence[str] = (),
    ) -> None:
        self.id = secrets.token_hex(16)
        self.name = name or socket.gethostname()
        self._settings = settings
        self._find_gateway = find_gateway
        self._host = host
        self._http = HttpServer.bind(settings, host, port)
        self.urls = [*self._http.urls, *(url.rstrip("/") for url in urls)]
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._tenancy: _ActiveLease | None = None
        self._closed = False
        self._litter = 0
        self._client = GatewayClient(find_gateway, settings.token)
        self._heart = HeartbeatThread(self._live)
        self._registered: float | None = None
        """When the gateway last took note of a sign of life."""
        self._attendance = SessionServer(self, self.id, settings.token, settings.shm_dir)

    @property
    def host_id(self) -> str:
        """Equal for processes that can share memory with this one."""
        return shared_memory.host_id(self._settings.shm_dir)

    def start(self) -> None:
        """Serve, and tell the gateway."""
        ways: dict[Upgrade, ConnectionHandler] = {
            store_frames.UPGRADE: _CurrentStore(self),
            attach_frames.UPGRADE: self._attendance,
        }
        self._http.start(self._app, ways)
        self._attendance.start()
        self._heart.start()
        self._heart.wake()

    def close(self, reason: str = "its agent ended") -> None:
        """End the lease, tell the gateway, close the server. Does nothing the second time.

        Args:
            reason: why, for the job's other ranks.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            tenancy = self._tenancy
        if tenancy is not None:
            self.release(tenancy.lease.id, reason)
        self._attendance.close()
        self._heart.stop()
        self._client.unregister(AgentLeave(self.id))
        self._client.close()
        self._http.close()

    # Leases

    def acquire(
        self, wanted: LeaseTerms, lease_id: str = "", *, lends: bool = False, joining: float | None = None
    ) -> tuple[Lease, Agent]:
        """Lease the agent, and have it join the job; returns when the job's world is complete.

        Args:
            wanted: for what.
            lease_id: random name of the lease; a new one if empty.
            lends: see Agent.
            joining: seconds the join may take; those of ``wanted`` if left out.

        Raises:
            AgentTakenError: somebody else has it.
            LeaseEndedError: it was released meanwhile.
            DistNetworkError: the join failed, as of Agent.
        """
        tenancy = self._reserve(wanted, lease_id)
        if joining is not None:
            tenancy.joining.restart(joining)
        return self._join(tenancy, wanted, lends=lends)

    def _reserve(self, wanted: LeaseTerms, lease_id: str = "") -> _ActiveLease:
        tenancy = _ActiveLease(wanted, lease_id or secrets.token_hex(16))
        with self._lock:
            if self._closed:
                raise AgentTakenError(f"agent {self.name!r} is about to end; ask the gateway for another")
            if self._tenancy is not None:
                raise AgentTakenError(
                    f"agent {self.name!r} is taken, {_who_has(self._tenancy.lease)}; ask the gateway for another"
                )
            self._tenancy = tenancy
        self._heart.wake()
        return tenancy

    def _join(self, tenancy: _ActiveLease, wanted: LeaseTerms, *, lends: bool = False) -> tuple[Lease, Agent]:
        try:
            agent = Agent(
                replace(self._settings, job=wanted.job),
                self._find_gateway,
                rank=wanted.rank,
                world_size=wanted.world_size,
                host=self._host,
                timeout=wanted.timeout,
                http=self._http,
                joining=tenancy.joining,
                instance=tenancy.instance,
                lends=lends,
            )
        except BaseException as error:
            self._free(tenancy)
            if tenancy.ended is not None:
                raise LeaseEndedError(f"the lease of agent {self.name!r} has ended: {tenancy.ended}") from error
            raise
        with self._lock:
            tenancy.lease.rank = agent.member.rank
            tenancy.agent = agent
            ended = tenancy.ended
        if ended is not None:
            self._end(tenancy, agent, ended)
            raise LeaseEndedError(f"the lease of agent {self.name!r} has ended: {ended}")
        self._heart.wake()
        return tenancy.lease, agent

    def acquire_in_background(self, wanted: LeaseTerms) -> tuple[Lease, Future[Lease]]:
        """Take the agent in a thread of its own.

        Returns:
            The lease, and a future of it, done when the job's world is complete or the join has failed.

        Raises:
            AgentTakenError: somebody else has it.
        """
        tenancy = self._reserve(wanted)
        future: Future[Lease] = Future()

        def join() -> None:
            try:
                future.set_result(self._join(tenancy, wanted)[0])
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=join, name="rankmesh-lease", daemon=True).start()
        return tenancy.lease, future

    def release(self, lease_id: str, reason: str = "", *, failed: bool = False) -> bool:
        """End a lease; a join that is under way ends with it. From any thread.

        Args:
            lease_id: which.
            reason: why, for the job's other ranks; empty if its holder was done.
            failed: whether its holder died: the others are told that the rank did, not that it left.

        Returns:
            Whether there was such a lease.
        """
        with self._lock:
            tenancy = self._tenancy
            if tenancy is None or tenancy.lease.id != lease_id or tenancy.ended is not None:
                return False
            tenancy.ended = reason
            agent = tenancy.agent
            if agent is None:
                tenancy.joining.restart(0.0)
        if agent is not None:
            self._end(tenancy, agent, reason, failed=failed)
        else:
            self._stop_joining(tenancy, reason)
        return True

    @property
    def lease(self) -> Lease | None:
        """The lease that the agent is given to, None while it is free."""
        with self._lock:
            return self._tenancy.lease if self._tenancy is not None else None

    def lease_state(self) -> LeaseState:
        """Return the lease, and how far it is.

        Raises:
            NotLeasedError: the agent is free.
        """
        with self._lock:
            if self._tenancy is None:
                raise self._not_leased()
            return LeaseState(self._tenancy.lease, "joining" if self._tenancy.agent is None else "joined")

    def agent_of(self, lease_id: str) -> Agent | None:
        """Return the agent that has joined for a lease; None if the lease has ended, or joins yet."""
        with self._lock:
            tenancy = self._tenancy
            return tenancy.agent if tenancy is not None and tenancy.lease.id == lease_id else None

    def _stop_joining(self, tenancy: _ActiveLease, reason: str) -> None:
        """Have the gateway answer the join that is held there; its client gives up then."""
        client = GatewayClient(self._find_gateway, self._settings.token)
        with contextlib.suppress(Exception):
            client.url = self._find_gateway() or ""
            client.leave(Leave(tenancy.lease.job, _ANY_EPOCH, tenancy.lease.rank, tenancy.instance, reason))
        client.close()

    def _end(self, tenancy: _ActiveLease, agent: Agent, reason: str, *, failed: bool = False) -> None:
        try:
            agent.close(reason, failed=failed)
            self._http.run(agent.aclose())
        finally:
            self._free(tenancy)

    def _free(self, tenancy: _ActiveLease) -> None:
        with self._lock:
            if self._tenancy is tenancy:
                self._tenancy = None
                self._litter = _GC_PASSES
        self._attendance.end_lease(tenancy.lease.id)
        self._heart.wake()

    def _live(self) -> None:
        """Tell the gateway who has the agent; and look whether that one still does."""
        if self._client.agent_heartbeat(self._sign_of_life()):
            self._registered = time.monotonic()
        self._end_if_idle()
        if self._litter:
            # Groups and their memory go in cycles. A process that then sleeps would keep that memory, scarce in
            # a container, until it has made enough objects for a collection of its own.
            self._litter -= 1
            gc.collect()

    def _end_if_idle(self) -> None:
        """End a lease that has not been used for as long as it may be idle."""
        with self._lock:
            tenancy = self._tenancy
            if tenancy is None or not tenancy.idle or time.monotonic() - tenancy.used < tenancy.idle:
                return
            agent = tenancy.agent
        if agent is not None and any(group.inflight for group in agent.groups()):
            self._touch()
            return
        _log.warning("agent %r was not used for %g s: the lease ends", self.name, tenancy.idle)
        self.release(tenancy.lease.id, f"its HTTP client did not use it for {tenancy.idle:g} s")

    def _touch(self) -> None:
        tenancy = self._tenancy
        if tenancy is not None:
            tenancy.used = time.monotonic()

    # What the HTTP face shows

    @property
    def settings(self) -> Settings:
        """What the environment said."""
        return self._settings

    @property
    def agent(self) -> Agent | None:
        """The agent that has joined a job, None while there is none."""
        tenancy = self._tenancy
        return tenancy.agent if tenancy is not None else None

    def require_agent(self) -> Agent:
        """Return the agent that has joined a job; its lease is in use.

        Raises:
            NotLeasedError: there is none.
        """
        agent = self.agent
        if agent is None:
            raise self._not_leased()
        self._touch()
        return agent

    def _not_leased(self) -> NotLeasedError:
        return NotLeasedError(
            f"agent {self.name!r} is in no job yet; attach an SDK process through the gateway, or POST /v1/lease with "
            "job, rank and world_size"
        )

    @property
    def store(self) -> AsyncStore:
        """The store of the job.

        Raises:
            NotLeasedError: the agent is free.
        """
        return self.require_agent().store

    def health(self) -> AgentHealth:
        """Return whether the agent can do its work; a free one can."""
        agent = self.agent
        if agent is not None:
            return agent.health()
        return AgentHealth("ok", "rankmesh-agent", UNASSIGNED, 0, __version__, [])

    def ready(self) -> bool:
        """Whether the agent takes part in its job; a free one, whether the gateway knows of it."""
        agent = self.agent
        if agent is not None:
            return agent.ready()
        registered = self._registered
        return not self._closed and registered is not None and time.monotonic() - registered < FAILED_SECONDS

    def info(self) -> AgentInfo:
        """Return who this agent is; one that is free has no job, and UNASSIGNED as its rank."""
        agent = self.agent
        if agent is not None:
            return agent.info()
        member = Member(UNASSIGNED, self.id, socket.gethostname(), self.host_id, os.getpid(), [], self._http.urls[0])
        uptime = time.monotonic() - self._started
        return AgentInfo("", 0, 0, member, self._find_gateway() or "", {}, uptime, __version__)

    def groups(self) -> list[GroupInfo]:
        """Return the groups the rank is a member of; none while the agent is free."""
        agent = self.agent
        return agent.groups() if agent is not None else []

    def group(self, name: str) -> LocalCommunicator | None:
        """Return the group of an id or name, None if the rank is in none.

        Raises:
            NotLeasedError: the agent is free.
        """
        return self.require_agent().group(name)

    def make_group(
        self, wanted: GroupRequest, begun: Callable[[LocalCommunicator], None]
    ) -> tuple[LocalCommunicator, bool]:
        """Make a group; see Agent.

        Raises:
            NotLeasedError: the agent is free.
        """
        return self.require_agent().make_group(wanted, begun)

    def delete_group(self, group: LocalCommunicator) -> None:
        """End a group; see Agent.

        Raises:
            NotLeasedError: the agent is free.
        """
        self.require_agent().delete_group(group)

    def in_flight(self, group: str) -> list[InFlight] | None:
        """Return a group's calls and messages that have begun and not ended: see Agent."""
        agent = self.agent
        return agent.in_flight(group) if agent is not None else None

    def flight_records(self, group: str | None, last: int | None) -> list[FlightRecord]:
        """Return the job's latest calls and messages; none while the agent is free."""
        agent = self.agent
        return agent.flight_records(group, last) if agent is not None else []

    def vitals(self) -> AgentStats:
        """Return what has been counted since the agent joined its job; nothing while it is free."""
        agent = self.agent
        return agent.vitals() if agent is not None else AgentStats()

    async def aclose(self) -> None:
        """Let go of what the HTTP face used: the lease has ended by then, and its agent's with it."""

    def _sign_of_life(self) -> AgentHeartbeat:
        lease = self.lease
        leases = [lease] if lease is not None else []
        return AgentHeartbeat(self.id, self.name, socket.gethostname(), self.host_id, os.getpid(), self.urls, leases)

    def _app(self) -> object:
        from rankmesh_agent.http.app import create_app

        names = [*self._http.names, self.name, *(_host_in(url) for url in self.urls)]
        return create_app(
            self, token=self._settings.token, names=names, leasable=True, max_tensor=self._settings.max_body
        )


class _CurrentStore:
    """The store's fast path of whatever agent there is."""

    def __init__(self, standalone: Standalone) -> None:
        self._standalone = standalone

    def handle(self, sock: socket.socket) -> None:
        agent = self._standalone.agent
        if agent is None or agent.store_server is None:
            sock.close()
        else:
            agent.store_server.handle(sock)

    def close(self) -> None:
        """The agent closes it."""

    def forget(self) -> None:
        """The agent forgets it."""


def _who_has(lease: Lease) -> str:
    rank = "a rank" if lease.rank == UNASSIGNED else f"rank {lease.rank}"
    return f"by {rank} of job {lease.job!r} ({lease.holder})"


def _host_in(url: str) -> str:
    return url.partition("://")[2].partition("/")[0].rpartition(":")[0].strip("[]")
