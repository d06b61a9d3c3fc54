"""Rendezvous of the launchers of a job on several nodes, for its restarts: a heartbeat to the gateway of node 0."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from dataclasses import asdict
from http import HTTPStatus

from rankmesh._launcher.plan import Plan
from rankmesh_agent.net.descriptors import DescriptorLimitError
from rankmesh_agent.net.http_client import HttpClient, NoResponseError
from rankmesh_agent.wire.schemas import (
    LAUNCHER_SECONDS,
    STARTING,
    LauncherHeartbeat,
    LauncherReply,
    LauncherState,
)

_RESPONSE_SECONDS = 2.0


class RestartRendezvous:
    """This launcher's heartbeat, and what the gateway replies.

    Args:
        job: plan of the job.

    Attributes:
        fd: descriptor that becomes readable when a reply has changed something.
        attempt: the attempt of this node's ranks.
        latest: the attempt of the job, as the gateway last replied.
        over: whether the job will not be restarted any more.
    """

    def __init__(self, job: Plan) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.attempt = STARTING
        self.latest = job.attempt
        self.over = False
        self._job = job
        self._instance = secrets.token_hex(16)
        self._report: tuple[int, LauncherState] = STARTING, "running"
        self._reported = 0
        self._exchanged = 0
        self._settled = threading.Condition()
        self._ended_alone = False
        self._http = HttpClient(job.token)
        self._changed = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._beat, name="rankmesh-launcher-heartbeat", daemon=True)

    @property
    def is_outdated(self) -> bool:
        """True if the job is at a later attempt than the ranks of this node."""
        return self.latest > self.attempt

    @property
    def is_decided(self) -> bool:
        """True if this node, whose ranks have ended, need not wait for the others any more."""
        return self.over or self.is_outdated or self._ended_alone

    def ask(self) -> None:
        """Ask the gateway which attempt the job is at, before the heartbeat begins; it may not be there yet."""
        self._exchange()

    def begin(self, attempt: int) -> None:
        """Report that the ranks of an attempt have been started; starts the heartbeat."""
        self.attempt, self.latest, self._ended_alone = attempt, max(self.latest, attempt), False
        self.report("running")
        if not self._thread.is_alive():
            self._thread.start()

    def report(self, state: LauncherState) -> None:
        """Report the state of this node's ranks."""
        with self._settled:
            self._report = self.attempt, state
            self._reported += 1
        self._changed.set()

    def settle(self) -> None:
        """Wait for the reply to the last report, or until there is none in time."""
        with self._settled:
            self._settled.wait_for(lambda: self._exchanged == self._reported, 2 * _RESPONSE_SECONDS)

    def acknowledge(self) -> None:
        """Make ``fd`` unreadable until the next change."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        """Send the last report and end the heartbeat."""
        self._closed = True
        self._changed.set()
        if self._thread.is_alive():
            self._thread.join()
        self._http.close()
        os.close(self.fd)

    def _beat(self) -> None:
        while True:
            self._changed.clear()
            closed = self._closed
            self._exchange()
            if closed:
                return
            self._changed.wait(LAUNCHER_SECONDS)

    def _exchange(self) -> None:
        """Send a heartbeat and record the reply."""
        job, options = self._job, self._job.options
        with self._settled:
            (attempt, state), number = self._report, self._reported
        beat = LauncherHeartbeat(
            job.job, options.node_rank, options.nnodes, self._instance, attempt, state, options.max_restarts
        )
        before = self.latest, self.over, self._ended_alone
        try:
            answer = self._http.request("POST", f"{job.url}/v1/launchers", asdict(beat), timeout=_RESPONSE_SECONDS)
            reply = LauncherReply(**answer.json()) if answer.status == HTTPStatus.OK else None
        except (NoResponseError, DescriptorLimitError, ValueError, TypeError):
            reply = None
        if reply is not None:
            self.latest, self.over = max(self.latest, reply.attempt), reply.over
        elif (attempt, state) == (self.attempt, "ended"):
            self._ended_alone = True  # the job ended on node 0, or its launcher is gone
        with self._settled:
            self._exchanged = number
            self._settled.notify_all()
        if before != (self.latest, self.over, self._ended_alone):
            os.eventfd_write(self.fd, 1)
