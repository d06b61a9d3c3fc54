"""Rendezvous of the launchers of a job on several nodes, for its nodes and restarts: a heartbeat to the gateway."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from rankmesh_agent.membership.gateway_client import RESPONSE_SECONDS, GatewayClient, UnavailableError
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.descriptors import DescriptorLimitError, log_failure
from rankmesh_agent.wire.errors import DistError, DistNetworkError
from rankmesh_agent.wire.schemas import (
    LAUNCHER_SECONDS,
    NO_NODE,
    STARTING,
    LauncherHeartbeat,
    LauncherReply,
    LauncherState,
)

FIRST_REPORT_SECONDS = 4.0
"""Seconds after the last call, without enough nodes or without a gateway, before the first report of that."""
REPORT_SECONDS = 10.0
"""Interval of the reports after that."""


class RendezvousError(Exception):
    """This node cannot be part of the job; the text has the reason."""


class NodeRendezvous:
    """This launcher's heartbeat, and what the gateway replies.

    Args:
        beat: the first heartbeat, but for ``instance`` and ``host``.

    Attributes:
        fd: descriptor that becomes readable when a reply has changed something.
        refusal: why the gateway rejects this launcher; empty if it does not.
    """

    def __init__(self, beat: LauncherHeartbeat, url: str, token: str) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.attempt = STARTING
        self.latest = LauncherReply(STARTING, over=False)
        self.refusal = ""
        self._beat = replace(beat, instance=secrets.token_hex(16), host=socket.gethostname())
        self._reported = 1
        self._exchanged = 0
        self._settled = threading.Condition()
        self._unanswered = "its address is not known yet"
        self._ended_alone = False
        self._gateway = GatewayClient(lambda: url, token)
        self._gateway.locate()
        self._changed = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._send_heartbeats, name="rankmesh-launcher-heartbeat", daemon=True)
        self._thread.start()

    @property
    def is_outdated(self) -> bool:
        """True if the job is at a later attempt than the ranks of this node."""
        return self.latest.attempt > self.attempt

    @property
    def must_end(self) -> str:
        """The reason for which the ranks of this node are to be ended; empty if there is none."""
        latest = self.latest
        if latest.over and latest.failed:
            return f"{latest.reason}, and no restart is left" if latest.membership else latest.reason
        return latest.reason if self.is_outdated else self.refusal

    @property
    def nodes_changed(self) -> bool:
        """True if the attempt of this node's ranks has ended because another node joins."""
        latest = self.latest
        return self.is_outdated and latest.membership and latest.restarts == self._beat.restarts

    @property
    def is_decided(self) -> bool:
        """True if this node, whose ranks have ended, need not wait for the others any more."""
        return self.latest.over or self.is_outdated or self._ended_alone or bool(self.refusal)

    @property
    def is_over(self) -> bool:
        """True if this node need not take part in another attempt."""
        return self.latest.over or self._ended_alone or bool(self.refusal)

    def join(
        self, deadline: Deadline, report: Callable[[str], None], interrupt: int | None = None
    ) -> LauncherReply | None:
        """Wait until the next attempt has its nodes, this one among them; return it and this node's place in it.

        The deadline ends the wait while nodes or the gateway are missing; a spare node waits for the job's end. None if
        the job is over, or the wait was interrupted.
        """
        self.report("waiting")
        next_report = time.monotonic() + self._beat.last_call + FIRST_REPORT_SECONDS
        while True:
            self.acknowledge()
            latest = self.latest
            if self.refusal:
                raise RendezvousError(self.refusal)
            if latest.over:
                return None
            if latest.nodes and latest.node != NO_NODE and self.is_outdated:
                return self._begin(latest)
            spare = not self._unanswered and latest.nodes > 0
            if deadline.expired() and not spare:
                raise RendezvousError(f"waited {deadline.seconds:g} s {self._missing()}")
            if time.monotonic() >= next_report:
                report(f"waits {self._missing()}" + ("" if spare else f" ({deadline.remaining():.0f} s left)"))
                next_report = time.monotonic() + REPORT_SECONDS
            until = (
                next_report - time.monotonic() if spare else min(next_report - time.monotonic(), deadline.remaining())
            )
            watched = [self.fd] if interrupt is None else [self.fd, interrupt]
            if interrupt in select.select(watched, [], [], max(0.0, until))[0]:
                return None

    def report(self, state: LauncherState) -> None:
        """Report the state of this node's ranks."""
        with self._settled:
            self._beat = replace(self._beat, state=state)
            self._reported += 1
        self._changed.set()

    def settle(self) -> None:
        """Wait for the reply to the last report, or until there is none in time."""
        with self._settled:
            self._settled.wait_for(lambda: self._exchanged == self._reported, 2 * RESPONSE_SECONDS)

    def acknowledge(self) -> None:
        """Make ``fd`` unreadable until the next change."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        """Send the last report and end the heartbeat."""
        self._closed = True
        self._changed.set()
        self._thread.join()
        self._gateway.close()
        os.close(self.fd)

    def _begin(self, latest: LauncherReply) -> LauncherReply:
        """Report that the ranks of an attempt run."""
        self.attempt = latest.attempt
        with self._settled:
            self._beat = replace(
                self._beat,
                node=latest.node,
                attempt=latest.attempt,
                attempt_nodes=latest.nodes,
                restarts=latest.restarts,
            )
        self.report("running")
        return latest

    def _missing(self) -> str:
        """Return what this node waits for."""
        where = f"job {self._beat.job!r} at {self._gateway.url}"
        if self._unanswered:
            return f"for the gateway of {where}: {self._unanswered}"
        if self.latest.nodes:
            return f"as a spare node of {where}, which has its {self.latest.nodes} nodes"
        return f"for the nodes of {where}: {self.latest.missing}"

    def _send_heartbeats(self) -> None:
        while True:
            self._changed.clear()
            closed = self._closed
            try:
                self._exchange()
            except Exception as error:
                log_failure("a heartbeat of this launcher could not be sent", error)
            if closed:
                return
            self._changed.wait(LAUNCHER_SECONDS)

    def _exchange(self) -> None:
        """Send a heartbeat and record the reply."""
        with self._settled:
            is_spare = self.latest.nodes > 0 and self.latest.node == NO_NODE
            beat, number = replace(self._beat, awaits=self.latest.attempt - is_spare), self._reported
        before = self.latest, self.refusal, self._ended_alone
        try:
            reply = self._gateway.read(LauncherReply, "launchers", beat)
            # Less than before only from a gateway that has another attempt, later than that of this node's ranks.
            if reply.attempt >= min(self.latest.attempt, self.attempt + 1):
                self.latest = reply
            self._unanswered, self._ended_alone = "", False
        except (UnavailableError, DistError) as error:
            if isinstance(error, DistError) and type(error) not in (DistNetworkError, DescriptorLimitError):
                self.refusal = error.message
            else:
                self._unanswered = str(error)
                # With the gateway gone, the job has ended on its node, or its launcher is lost.
                self._ended_alone = beat.state == "ended"
        with self._settled:
            self._exchanged = number
            self._settled.notify_all()
        if before != (self.latest, self.refusal, self._ended_alone):
            os.eventfd_write(self.fd, 1)
