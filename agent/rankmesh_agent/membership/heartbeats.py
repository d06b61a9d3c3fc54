"""Heartbeats of a rank, and of a standalone agent, at the gateway: their thread, when one is due, contents, replies."""

from __future__ import annotations

import logging
import math
import os
import random
import select
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Protocol, TypeVar

from rankmesh_agent.membership.gateway_client import GatewayClient, UnavailableError
from rankmesh_agent.net.descriptors import DescriptorLimitError, log_failure, warn_exhausted
from rankmesh_agent.wire.errors import DistBackendError, DistError
from rankmesh_agent.wire.schemas import (
    HEARTBEAT_SECONDS,
    LISTED_RANKS,
    SUSPECT_SECONDS,
    AgentHeartbeat,
    Done,
    GroupInfo,
    Heartbeat,
    HeartbeatReply,
    LostRank,
    failed_seconds,
)
from rankmesh_agent.wire.stats import HeartbeatStats

_log = logging.getLogger("rankmesh")

T = TypeVar("T")

_NAME = "rankmesh-heartbeat"
_MIN_INTERVAL_SECONDS = 0.1
_ATTEMPTS = 3
"""Heartbeats in a row at most: after the first one, the gateway may ask for a complete one, and for groups' ranks."""


class FailureSource(Protocol):
    """Detector of failed peers: a new failure is sent to the gateway at once."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when ``poll`` has to be called."""

    def poll(self) -> bool:
        """Return whether a peer has failed that no heartbeat has reported."""

    def next_check(self) -> float:
        """Return in how many seconds ``poll`` has to be called even if the descriptor is not readable."""


class HeartbeatThread(threading.Thread):
    """Sends heartbeats, by ``send``, until it is stopped; at once when ``failures`` has a new one."""

    def __init__(self, send: Callable[[], object], failures: FailureSource | None = None) -> None:
        super().__init__(name=_NAME, daemon=True)
        self._send = send
        self._failures = failures
        self._taken_over = False
        self._stopping = threading.Event()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()  # the descriptor is not written to after its number has become another file's
        self._closed = False

    def run(self) -> None:
        """Send heartbeats."""
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        watched: FailureSource | None = None
        last = time.monotonic()
        while not self._stopping.is_set():
            try:
                if self._failures is not watched and self._failures is not None:
                    watched = self._failures
                    poll.register(watched.fileno(), select.POLLIN)
                urgent = self._wait(poll, last + HEARTBEAT_SECONDS)
                if self._stopping.is_set():
                    return
                if urgent:  # a job in which many ranks fail at once is reported in few heartbeats
                    if self._stopping.wait(last + _MIN_INTERVAL_SECONDS - time.monotonic()):
                        return
                elif time.monotonic() < last + HEARTBEAT_SECONDS:
                    continue
                last = time.monotonic()
                self._send()
            except Exception as error:  # without heartbeats the gateway would declare this rank failed
                log_failure("a heartbeat could not be sent", error)
                self._stopping.wait(_MIN_INTERVAL_SECONDS)

    def take_over(self, send: Callable[[], object], failures: FailureSource) -> None:
        """Send other heartbeats from now on; see the class's arguments. Only once, and if there were no failures."""
        self._send, self._failures = send, failures
        self._taken_over = True
        self.wake()

    def wake(self) -> None:
        """Send a heartbeat now. From any thread; does nothing once stopped."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._wakeup, 1)

    def stop_soon(self) -> None:
        """Have the thread end, without waiting for it."""
        self._stopping.set()
        self.wake()

    def stop(self) -> None:
        """End the thread. Does nothing the second time."""
        self.stop_soon()
        if self.is_alive():
            self.join()
        self._close()

    def _wait(self, poll: select.poll, until: float) -> bool:
        """Wait until the next heartbeat is due; return whether there is news before."""
        seconds = max(0.0, until - time.monotonic())
        if self._failures is not None:
            seconds = min(seconds, self._failures.next_check())
        ready = {fd for fd, _ in poll.poll(math.ceil(seconds * 1000))}
        woken = self._wakeup in ready
        if woken:
            os.eventfd_read(self._wakeup)
        if self._taken_over:
            self._taken_over = woken = False
        return (self._failures is not None and self._failures.poll()) or woken

    def _close(self) -> None:
        with self._lock:
            closed, self._closed = self._closed, True
            if not closed:
                os.close(self._wakeup)


class HeartbeatSchedule:
    """Times of one rank's heartbeats, ``interval`` seconds apart. At HEARTBEAT_SECONDS, each tick sends one.

    ``fraction`` returns random numbers from 0 to 1.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, fraction: Callable[[], float] = random.random
    ) -> None:
        self.interval = HEARTBEAT_SECONDS
        self._clock, self._fraction = clock, fraction
        self._next = clock()
        self._losses = 0

    def set_interval(self, interval: float) -> None:
        """Set the time of the next heartbeat, from now; after a change, that is a random part of the interval."""
        changed, self.interval = interval != self.interval, interval
        self._next = self._clock() + interval * (self._fraction() if changed else 1.0)

    def retry(self) -> None:
        """Have a heartbeat without a response repeated after one or two seconds."""
        self._next = self._clock() + min(self.interval, HEARTBEAT_SECONDS * (1 + self._fraction()))

    def is_due(self, losses: int) -> bool:
        """Return whether a heartbeat is due.

        Args:
            losses: the number of lost ranks that it would report. A new one is reported within half the interval: of
                many ranks that have lost the same one, the first reports it soon.
        """
        if losses > self._losses:
            self._losses = losses
            spread = self._fraction() * (self.interval - HEARTBEAT_SECONDS) / 2
            self._next = min(self._next, self._clock() + spread)
        return self.interval <= HEARTBEAT_SECONDS or self._clock() >= self._next


class HeartbeatChanges:
    """Changes of one rank's groups and of the ranks that it has lost, as the gateway does not know them yet."""

    def __init__(self) -> None:
        self._number = 0
        self._sent: dict[str, GroupInfo] = {}
        self._sent_lost: set[int] = set()
        self._wanted: set[str] = set()
        self.forget()

    def forget(self) -> None:
        """Make the next heartbeat complete: it is not known whether the gateway has recorded the last one."""
        self._known: dict[str, GroupInfo] = {}
        self._known_lost: set[int] = set()
        self._acknowledged = self._failed_version = 0

    def reduced(self, beat: Heartbeat) -> Heartbeat:
        """Return a complete heartbeat as it is sent."""
        self._number += 1
        self._sent = {group.id: group for group in beat.groups}
        self._sent_lost = {each.rank for each in beat.lost}
        return replace(
            beat,
            groups=[
                self._reported(group, beat.member.rank)
                for group in beat.groups
                if group.id in self._wanted or self._known.get(group.id) != group
            ],
            lost=[each for each in beat.lost if each.rank not in self._known_lost],
            number=self._number,
            changes_since=self._acknowledged,
            ended_groups=[group for group in self._known if group not in self._sent],
            failed_version=self._failed_version,
        )

    def acknowledge(self, reply: HeartbeatReply) -> bool:
        """Record the reply to the last heartbeat; return whether the gateway needs another one now."""
        if reply.resend:
            self.forget()
        else:
            self._known, self._known_lost, self._acknowledged = self._sent, self._sent_lost, self._number
            self._failed_version = reply.failed_version
        self._wanted = set(reply.unknown_groups)
        return reply.resend or bool(self._wanted)

    def _reported(self, group: GroupInfo, rank: int) -> GroupInfo:
        new = group.id not in self._known and (len(group.ranks) <= LISTED_RANKS or rank == group.ranks[0])
        return group if new or group.id in self._wanted else replace(group, ranks=[])


class _Heartbeats:
    """Heartbeats over a client; a gateway that is silent for three intervals is located again: it may have moved."""

    def __init__(self, gateway: GatewayClient, interval: float = HEARTBEAT_SECONDS) -> None:
        self._gateway = gateway
        self._last_response = time.monotonic()
        self._answered = self._unanswered = 0
        self._schedule = HeartbeatSchedule()
        self._schedule.set_interval(interval)

    def _send(self, kind: type[T], path: str, heartbeat: Heartbeat | AgentHeartbeat) -> T | DistError | None:
        """Send a heartbeat; return the reply, or the gateway's refusal, None without either."""
        answer: T | DistError | None = None
        try:
            answer = self._gateway.read(kind, path, heartbeat)
        except UnavailableError:
            pass
        except DescriptorLimitError as error:
            warn_exhausted("a heartbeat could not be sent", error.__cause__ or error)
        except DistError as error:
            answer = error
        if answer is not None:
            self._answered += 1
            self._last_response = time.monotonic()
        else:
            self._unanswered += 1
        if time.monotonic() - self._last_response > SUSPECT_SECONDS * self._schedule.interval / HEARTBEAT_SECONDS:
            self._gateway.locate()
        return answer

    def stats(self) -> HeartbeatStats:
        """Return counts of the heartbeats so far."""
        return HeartbeatStats(self._answered, self._unanswered, time.monotonic() - self._last_response)


class RankHeartbeats(_Heartbeats):
    """Heartbeats of one rank; see _Heartbeats."""

    def __init__(self, gateway: GatewayClient, interval: float = HEARTBEAT_SECONDS) -> None:
        super().__init__(gateway, interval)
        self._changes = HeartbeatChanges()
        self._declared_failed = False
        self._dropped_groups = 0

    def is_due(self, lost: Collection[LostRank]) -> bool:
        """Return whether a heartbeat is due, which would report lost ranks; see HeartbeatSchedule."""
        return self._schedule.is_due(len(lost))

    def send(self, heartbeat: Heartbeat) -> DistBackendError | None:
        """Send a heartbeat; return the error that ends this rank's groups if all ranks of the job start again."""
        for _ in range(_ATTEMPTS):
            reply = self._send(HeartbeatReply, "heartbeat", self._changes.reduced(heartbeat))
            if not isinstance(reply, HeartbeatReply):
                self._changes.forget()
                self._schedule.retry()
                return None
            self._schedule.set_interval(reply.interval)
            if reply.restart:
                return reply.restart_error()
            self._warn(heartbeat, reply)
            if not self._changes.acknowledge(reply):
                break
        return None

    def _warn(self, heartbeat: Heartbeat, reply: HeartbeatReply) -> None:
        """Log once that the gateway drops groups of this rank, and that it has declared the rank failed."""
        if reply.dropped_groups and not self._dropped_groups:
            _log.warning(
                "%s has %d groups more than the gateway keeps: they are not shown there; destroy groups that are "
                "no longer used",
                heartbeat.member.described(),
                reply.dropped_groups,
            )
        self._dropped_groups = reply.dropped_groups
        if heartbeat.member.rank in reply.failed and not self._declared_failed:
            self._declared_failed = True
            _log.warning(
                "%s is failed for the gateway at %s: a peer lost its connection, or no heartbeat arrived for %g s. "
                "That is final for epoch %d: further heartbeats are ignored; GET /v1/ranks has the reason",
                heartbeat.member.described(),
                self._gateway.url,
                failed_seconds(self._schedule.interval),
                heartbeat.epoch,
            )


class AgentHeartbeats(_Heartbeats):
    """Heartbeats of one standalone agent; see _Heartbeats."""

    _refused = False

    def send(self, heartbeat: AgentHeartbeat) -> bool:
        """Send a heartbeat; return whether the gateway has accepted it. A refusal is logged once."""
        gateway = self._gateway
        if not gateway.url:
            gateway.url = gateway.find() or ""
        answer = self._send(Done, "agents", heartbeat) if gateway.url else None
        refused = isinstance(answer, DistError)
        if refused and not self._refused:
            _log.warning("standalone agent %s is not registered: %s", heartbeat.name, answer)
        self._refused = refused
        return isinstance(answer, Done)
