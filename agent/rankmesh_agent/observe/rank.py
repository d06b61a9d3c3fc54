"""A rank under ``rankmesh observe``: joined to a gateway in place of its process, which is seen from outside."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.diagnostics import process
from rankmesh_agent.diagnostics.snapshot import SnapshotServer
from rankmesh_agent.http.server import HttpServer
from rankmesh_agent.membership.gateway_client import GatewayClient
from rankmesh_agent.membership.heartbeats import HeartbeatThread, RankHeartbeats
from rankmesh_agent.membership.join import join
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.host import host_id
from rankmesh_agent.observe.processes import RankProcess, python_below
from rankmesh_agent.wire.hello import Client, Service
from rankmesh_agent.wire.schemas import Heartbeat, JoinRequest, Leave, Member, ThreadStack
from rankmesh_agent.wire.snapshot import RUNNING, ProcessView

_SAMPLE_SECONDS = 15.0
"""Most time between two samples of the stack, of which each takes some 30 ms of a core; less at the beginning."""
_ANSWER_SECONDS, _PAUSE_SECONDS = 1.1, 0.08
"""Seconds of further samples of a stack for one answer, unless it changes, and the time between two of them: half as
long if the stack has been the same before."""
_SPY_SECONDS = 3.0
"""Time limit of py-spy, on a busy host."""


class ObservedRank:
    """One rank from its join, for which the constructor waits, to its leave.

    Args:
        settings: of the job: its name and credentials.
        find_gateway: returns the gateway's URL, None while it is not known.
        host: address at which the gateway reaches this process.
        found: the process, its rank, and the number of ranks.

    Attributes:
        pid: the process.

    Raises:
        DistNetworkError: the join failed; the subclass and the message have the cause.
    """

    def __init__(
        self, settings: Settings, find_gateway: Callable[[], str | None], host: str, found: RankProcess
    ) -> None:
        self.pid = found.pid
        self._lock = threading.Lock()
        self._frames: list[tuple[str, int, str]] | None = None
        self._stacks: list[ThreadStack] = []
        self._since = self._sampled_at = time.monotonic()
        self._sample_seconds = 1.0
        self._http = HttpServer.bind(settings, host)
        views = SnapshotServer(self._view, lambda: settings.job_credentials, Service.PROCESS)
        self._http.start(lambda: _not_found, {Service.PROCESS: views}, on_demand=True)
        self._gateway = GatewayClient(find_gateway, settings.job_token)
        here, url = host_id(settings.shm_dir), self._http.urls[0]
        self._member = Member(
            found.rank, secrets.token_hex(16), socket.gethostname(), here, found.pid, [], url, observed=True
        )
        request = JoinRequest(settings.job, found.world_size, self._member)
        joined = join(self._gateway, request, Deadline(settings.timeout), settings)
        self._job, self._epoch, self._world_size = joined.job, joined.epoch, joined.world_size
        self._beats = RankHeartbeats(self._gateway, joined.interval)
        self._heartbeats = HeartbeatThread(self._send_heartbeat)
        self._heartbeats.start()
        self._heartbeats.wake()

    def leave(self, reason: str) -> None:
        """Leave the job: with a reason, if the process has failed. Does not wait for samples under way."""
        self._heartbeats.stop_soon()
        member = self._member
        with self._gateway.sibling() as client:
            client.leave(Leave(self._job, self._epoch, member.rank, member.instance, reason))
        threading.Thread(target=self._http.close, daemon=True).start()

    def _send_heartbeat(self) -> None:
        if self._beats.is_due([]):
            place = self._job, self._epoch, self._world_size, self._member
            self._beats.send(Heartbeat(*place, usage=process.usage_of(python_below(self.pid))))
        if time.monotonic() >= self._sampled_at + self._sample_seconds:
            self._sample_seconds = min(2 * self._sample_seconds, _SAMPLE_SECONDS)
            self._sample()

    def _view(self, _: Client) -> ProcessView:
        """Return the process, with the time for which several samples of its stack have been the same."""
        view = self._sample()
        until = time.monotonic() + _ANSWER_SECONDS / (2 if view.unchanged >= _ANSWER_SECONDS else 1)
        while time.monotonic() < until and view.state in RUNNING and view.stacks:
            time.sleep(_PAUSE_SECONDS)
            view = self._sample()
            if not view.unchanged:
                break
        return view

    def _sample(self) -> ProcessView:
        with self._lock:
            view = process.view(python_below(self.pid), _SPY_SECONDS)
            now = self._sampled_at = time.monotonic()
            if not view.stacks and self._stacks and view.state in RUNNING:  # py-spy had no time, or met a change
                view.stacks, view.no_stacks = self._stacks, ""
                return view
            self._stacks = view.stacks
            calls = [each for stack in view.stacks[:1] for each in stack.frames if each.origin == "user"]
            frames = [(each.file, each.line, each.function) for each in calls]
            if frames != self._frames:
                self._frames, self._since = frames, now
            view.unchanged = now - self._since
            return view


async def _not_found(scope: Any, receive: Any, send: Any) -> None:
    """Be the ASGI application of a process that serves its gateway alone."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b"this is an observer of 'rankmesh observe'\n"})
