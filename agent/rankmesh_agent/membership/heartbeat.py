"""Heartbeat thread of an agent: one heartbeat every HEARTBEAT_SECONDS, and at once when there is news."""

from __future__ import annotations

import math
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Protocol

from rankmesh_agent.net.descriptors import log_failure
from rankmesh_agent.wire.schemas import HEARTBEAT_SECONDS

_NAME = "rankmesh-heartbeat"
_MIN_INTERVAL_SECONDS = 0.1
"""The least time between two heartbeats."""


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
