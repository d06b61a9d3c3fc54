"""Session of an attached process at its agent: the lease, and what the requests of its streams use."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

from rankmesh_agent.agent import Agent
from rankmesh_agent.collectives.link import Array
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.group.messages import PendingMessage
from rankmesh_agent.net.stream import FramedStream, StreamClosedError, StreamTimeoutError
from rankmesh_agent.remote.codec import Joined, encode, error_data
from rankmesh_agent.remote.leases import LeaseManager
from rankmesh_agent.wire import attach_frames
from rankmesh_agent.wire.attach_frames import Kind
from rankmesh_agent.wire.errors import DistBackendError, GroupAbortedError, LeaseEndedError
from rankmesh_agent.wire.schemas import LeaseTerms


class HeldMessage(NamedTuple):
    """A message in progress, and the array it is received into; None if it is sent."""

    group: LocalCommunicator
    message: PendingMessage
    array: Array | None


class Session:
    """An attached process at its agent, which joins the process's job.

    Args:
        stream: of the process; it is the lease.

    Attributes:
        messages: its messages in progress, by its own numbers.
        lost: errors of the ranks that have failed since it has asked for them.

    Raises:
        AgentTakenError: the agent is leased already.
    """

    agent: Agent
    groups: dict[int, LocalCommunicator]
    messages: dict[int, HeldMessage]

    def __init__(self, leases: LeaseManager, stream: FramedStream, terms: LeaseTerms) -> None:
        self.lost: deque[DistBackendError] = deque()
        self._leases = leases
        self._stream = stream
        self._send_lock = threading.Lock()
        self._lock = threading.Lock()
        self._streams: set[FramedStream] | None = None
        """The streams for calls; None while there may be none: before the join, and after the end."""
        self._released = False
        # Does not wait for the join: the server detects the end of the process meanwhile.
        self.active = leases.acquire(terms, self._on_end)

    def await_join(self) -> None:
        """Have the process get the response to its lease request when the join is over."""
        self.active.joining.add_done_callback(self._on_joined)

    def release(self, reason: str, **how: Any) -> None:
        """End the lease and the streams, for the process; see LeaseManager.release."""
        self._released = True
        self._leases.release(self.active.lease.id, reason, **how)
        self._close()
        wait([self.active.joining])

    def respond(self, kind: Kind, document: bytes = b"") -> None:
        """Send a response on the lease's stream; nothing if the process is gone."""
        with self._send_lock, contextlib.suppress(StreamClosedError, StreamTimeoutError):
            self._stream.send(attach_frames.encode(kind, document))

    def ended(self) -> LeaseEndedError | None:
        """Return the error of calls after the agent, and not the process, has ended the lease."""
        reason = "" if self._released else self.active.end_reason
        return LeaseEndedError(reason) if reason else None

    @contextlib.contextmanager
    def serving(self, stream: FramedStream) -> Iterator[None]:
        """Have the end of the session end a stream that is being served."""
        with self._lock:
            if self._streams is None:
                raise StreamClosedError("the lease has ended")
            self._streams.add(stream)
        try:
            yield
        finally:
            with self._lock:
                if self._streams is not None:
                    self._streams.discard(stream)

    def _on_joined(self, joining: Future[Agent]) -> None:
        error = joining.exception()
        if error is not None:
            self.respond(Kind.ERROR, encode(error_data(error)))
            self._stream.shutdown()
            return
        self.enter(joining.result())
        with self._lock:
            self._streams = set()
        if self._released:
            self._close()
        self.respond(Kind.OK, encode(Joined.of(self.agent, self.active.lease.id)))

    def _on_end(self, reason: str) -> None:
        if self._close() and not self._released:
            self.respond(Kind.ERROR, encode(error_data(LeaseEndedError(reason))))
            self._stream.shutdown()

    def _close(self) -> bool:
        """End the streams: their threads end with the calls in progress. Return whether that is new."""
        with self._lock:
            streams, self._streams = self._streams, None
        if streams is None:
            return False
        for stream in streams:
            stream.shutdown()
        return True

    # For the requests

    def enter(self, agent: Agent) -> None:
        """Enter the epoch that the agent has joined."""
        agent.watch_failures(self.lost.append)
        self.agent = agent
        self.groups, self.messages = {agent.world.id: agent.world}, {}

    def grow(self, world_size: int, seconds: float, check: Callable[[], None]) -> None:
        """Have the agent join the epoch of a larger world; the groups and messages before end. See Agent.grow."""
        self.enter(self._leases.grow(self.active, world_size, seconds, check))

    def group(self, number: int) -> LocalCommunicator:
        """Return a group by its id."""
        group = self.groups.get(number)
        if group is None:
            raise GroupAbortedError("the agent has no such group any more: it has been destroyed, or the lease ended")
        return group

    def drop(self, number: int) -> LocalCommunicator:
        """Return a group by its id, and forget it and its messages."""
        group = self.group(number)
        del self.groups[number]
        for key, held in self.messages.copy().items():
            if held.group is group:
                self.messages.pop(key, None)
        return group

    def message(self, number: int) -> HeldMessage:
        """Return a message in progress."""
        held = self.messages.get(number)
        if held is None:
            raise GroupAbortedError("the agent does not know the message any more: its group has been destroyed")
        return held
