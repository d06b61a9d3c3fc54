"""Standalone agent: an HTTP server, and an Agent behind it for each lease.

An attached SDK process or an HTTP client leases it and has it join a job as one rank. To its peers it is an agent like
any other. When the lease ends it leaves the job and is free for the next.
"""

from __future__ import annotations

import gc
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.diagnostics.snapshot import SnapshotServer
from rankmesh_agent.group.flight_recorder import FlightRecorder
from rankmesh_agent.http.server import ConnectionHandler, HttpServer
from rankmesh_agent.membership.gateway_client import GatewayClient
from rankmesh_agent.membership.heartbeats import AgentHeartbeats, HeartbeatThread
from rankmesh_agent.net.host import host_id
from rankmesh_agent.remote.leases import LeaseManager
from rankmesh_agent.remote.server import SessionServer
from rankmesh_agent.wire.credentials import Credentials, Grant
from rankmesh_agent.wire.hello import Service
from rankmesh_agent.wire.schemas import (
    FAILED_SECONDS,
    UNASSIGNED,
    AgentHealth,
    AgentHeartbeat,
    AgentInfo,
    AgentLeave,
    GroupInfo,
    Member,
)
from rankmesh_agent.wire.snapshot import MAX_DUMPED, MAX_ENDED, RankSnapshot
from rankmesh_agent.wire.stats import AgentStats
from rankmesh_agent.wire.version import __version__

_GC_PASSES = 2
"""Heartbeats after a lease at which its memory is collected: at the first, its threads may still end."""


class Standalone:
    """A standalone agent, from the first heartbeat to the end.

    Args:
        host, port: address to listen on, and port; 0 for any free one.
        name: for people, and for the order in which agents are leased; the host's name if empty.
        urls: more base URLs under which clients can reach it: ports that are published elsewhere.

    Attributes:
        recorder: has no calls: they are those of the leases.

    Raises:
        ValueError: other hosts could reach it, and there is no token.
        AddressInUseError: another process listens there.
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
        self.settings = settings
        self.recorder = FlightRecorder(0)
        self.id = secrets.token_hex(16)
        self.name = name or socket.gethostname()
        self._find_gateway = find_gateway
        self._http = HttpServer.bind(settings, host, port)
        self.urls = [*self._http.urls, *(url.rstrip("/") for url in urls)]
        self._started = time.monotonic()
        self._closed = False
        self._gc_passes = 0
        self._gateway = GatewayClient(find_gateway, settings.token)
        self._beats = AgentHeartbeats(self._gateway)
        self._heartbeats = HeartbeatThread(self._send_heartbeat)
        self._registered: float | None = None
        """When the gateway accepted the latest heartbeat."""
        self.leases = LeaseManager(
            self.name, settings, find_gateway, host=host, http=self._http, on_change=self._heartbeats.wake
        )
        self._sessions = SessionServer(self.leases, self.id, settings.credentials, settings.shm_dir)

    @property
    def host_id(self) -> str:
        """Equal for processes that can share memory with this one."""
        return host_id(self.settings.shm_dir)

    @property
    def failure(self) -> str:
        """Why its port cannot be served, '' if it can."""
        return self._http.failure

    def start(self, on_failure: Callable[[], object] = lambda: None) -> None:
        """Serve, and register with the gateway; ``on_failure`` is called in another thread once there is a failure."""
        services: dict[Service, ConnectionHandler] = {
            Service.ATTACH: self._sessions,
            Service.SNAPSHOT: SnapshotServer(lambda client: self._snapshot(client.grant), self._snapshot_credentials),
            Service.RECORDS: SnapshotServer(
                lambda client: self._snapshot(client.grant, MAX_DUMPED), self._snapshot_credentials, Service.RECORDS
            ),
        }
        self._http.start(self._app, services, unix_listeners=self._sessions.listen(), on_failure=on_failure)
        self._heartbeats.start()
        self._heartbeats.wake()

    def close(self, reason: str = "its agent ended") -> None:
        """End the lease, with a reason for the job's other ranks, and stop serving. Does nothing the second time."""
        self._closed = True
        if not self.leases.close(reason):
            return
        self._sessions.close()
        self._heartbeats.stop()
        self._gateway.unregister(AgentLeave(self.id))
        self._gateway.close()
        self._http.close()

    def _send_heartbeat(self) -> None:
        lease = self.leases.lease
        leases = [lease] if lease is not None else []
        if leases:
            self._gc_passes = _GC_PASSES
        beat = AgentHeartbeat(self.id, self.name, socket.gethostname(), self.host_id, os.getpid(), self.urls, leases)
        if self._beats.send(beat):
            self._registered = time.monotonic()
        self.leases.watch()
        if self._gc_passes and not leases:
            # Groups and their memory are in reference cycles. A process that then sleeps would keep that memory,
            # scarce in a container, until it has allocated enough objects for a collection.
            self._gc_passes -= 1
            gc.collect()

    def _app(self) -> object:
        from rankmesh_agent.http.app import create_app

        names = [*self._http.names, self.name, *(_host_in(url) for url in self.urls)]
        token, most = self.settings.credentials, self.settings.max_body
        return create_app(self, token=token, names=names, leases=self.leases, max_tensor=most)

    # State of the free agent, for the HTTP endpoints

    def health(self) -> AgentHealth:
        """Return that the agent can do its work."""
        return AgentHealth("ok", "rankmesh-agent", UNASSIGNED, 0, __version__, [])

    def ready(self) -> bool:
        """Return whether the gateway has registered the agent."""
        registered = self._registered
        return not self._closed and registered is not None and time.monotonic() - registered < FAILED_SECONDS

    def info(self) -> AgentInfo:
        """Return the agent's addresses and version; it has no job, and rank UNASSIGNED."""
        member = Member(UNASSIGNED, self.id, socket.gethostname(), self.host_id, os.getpid(), [], self._http.urls[0])
        uptime = time.monotonic() - self._started
        return AgentInfo("", 0, 0, member, self._find_gateway() or "", {}, uptime, __version__)

    def groups(self) -> list[GroupInfo]:
        """Return no groups."""
        return []

    def stats(self) -> AgentStats:
        """Return no counters."""
        return AgentStats()

    def _snapshot(self, grant: Grant, max_ended: int = MAX_ENDED) -> RankSnapshot | None:
        agent = self.leases.agent if grant.job is None else self.leases.current(grant)
        return None if agent is None else agent.snapshot(attached=True, max_ended=max_ended)

    def _snapshot_credentials(self) -> Credentials:
        lease = self.leases.lease
        return replace(self.settings.credentials, job="" if lease is None else lease.job)


def _host_in(url: str) -> str:
    return url.partition("://")[2].partition("/")[0].rpartition(":")[0].strip("[]")
