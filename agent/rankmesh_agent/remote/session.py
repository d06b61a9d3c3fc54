"""Session of an attached process at its agent: what the requests of its streams use."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from rankmesh_agent.agent import Agent
from rankmesh_agent.collectives.link import Array
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.group.messages import PendingMessage
from rankmesh_agent.net.stream import FramedStream, StreamClosedError
from rankmesh_agent.wire.errors import DistBackendError, DistError, GroupAbortedError


class HeldMessage(NamedTuple):
    """A message in progress.

    Attributes:
        group: its group.
        message: the message.
        array: the array it is received into, None if it is sent.
    """

    group: LocalCommunicator
    message: PendingMessage
    array: Array | None


class Session:
    """The agent's side of a lease.

    Args:
        agent: has joined the job.
        grow: has the agent join the epoch of a larger world, see LeaseManager.
        ended: returns the error of calls after the agent has ended the lease; None if it has not.

    Attributes:
        agent, ended: see above.
        groups: the process's groups, by their ids.
        messages: its messages in progress, by its own numbers.
        lost: errors of the ranks that have failed since it has asked for them.
        store: the job's store.
    """

    def __init__(
        self,
        agent: Agent,
        grow: Callable[[int, float, Callable[[], None]], Agent],
        ended: Callable[[], DistError | None] = lambda: None,
    ) -> None:
        self.ended = ended
        self.lost: deque[DistBackendError] = deque()
        self._grow = grow
        self._lock = threading.Lock()
        self._streams: set[FramedStream] = set()
        self._closed = False
        self._enter(agent)

    def _enter(self, agent: Agent) -> None:
        agent.watch_failures(self.lost.append)
        self.agent = agent
        self.groups: dict[int, LocalCommunicator] = {agent.world.id: agent.world}
        self.messages: dict[int, HeldMessage] = {}
        self.store = agent.open_store()

    @contextmanager
    def serving(self, stream: FramedStream) -> Iterator[None]:
        """Have ``close`` end a stream that is being served.

        Raises:
            StreamClosedError: the session is closed already.
        """
        with self._lock:
            if self._closed:
                raise StreamClosedError("the lease has ended")
            self._streams.add(stream)
        try:
            yield
        finally:
            with self._lock:
                self._streams.discard(stream)

    def close(self) -> None:
        """End the streams: their threads end with the calls in progress."""
        with self._lock:
            self._closed = True
            streams = list(self._streams)
        for stream in streams:
            stream.shutdown()
        self.store.close()

    def grow(self, world_size: int, seconds: float, check: Callable[[], None]) -> None:
        """Have the agent join the epoch of a larger world; the groups and messages before end. See Agent.grow."""
        before = self.store
        self._enter(self._grow(world_size, seconds, check))
        before.close()

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
