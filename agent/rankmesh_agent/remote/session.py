"""Session of an attached process at its agent: its groups, messages and store, and the requests whose form is JSON."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from rankmesh_agent.agent import Agent
from rankmesh_agent.backends.custom import CustomBackend
from rankmesh_agent.collectives.link import Array
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.group.messages import PendingMessage
from rankmesh_agent.group.options import Options
from rankmesh_agent.net.stream import Frame, FramedStream, StreamClosedError
from rankmesh_agent.remote.codec import describe_group, error_from_json, error_to_json, key_from_json
from rankmesh_agent.store.client import StoreClient
from rankmesh_agent.wire import attach_frames
from rankmesh_agent.wire.attach_frames import Request
from rankmesh_agent.wire.errors import DistBackendError, DistError, GroupAbortedError, ProtocolError
from rankmesh_agent.wire.goodbye import Goodbye

Json = dict[str, Any]


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
        messages: the messages in progress, by the client's numbers.
    """

    def __init__(
        self,
        agent: Agent,
        grow: Callable[[int, float, Callable[[], None]], Agent],
        ended: Callable[[], DistError | None] = lambda: None,
    ) -> None:
        self.ended = ended
        self._agent = agent
        self._grow = grow
        self._lost: deque[DistBackendError] = deque()
        agent.watch_failures(self._lost.append)
        self._lock = threading.Lock()
        self._groups: dict[int, LocalCommunicator] = {agent.world.id: agent.world}
        self.messages: dict[int, HeldMessage] = {}
        self._streams: set[FramedStream] = set()
        self._closed = False

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

    def grow(self, world_size: int, seconds: float, check: Callable[[], None]) -> Agent:
        """Have the agent join the epoch of a larger world; the groups and messages before end. See Agent.grow."""
        agent = self._grow(world_size, seconds, check)
        agent.watch_failures(self._lost.append)
        self._groups = {agent.world.id: agent.world}
        self.messages.clear()
        self._agent = agent
        return agent

    # State, for the streams

    def group(self, number: int) -> LocalCommunicator:
        """Return a group by its id."""
        group = self._groups.get(number)
        if group is None:
            raise GroupAbortedError("the agent has no such group any more: it has been destroyed, or the lease ended")
        return group

    def message(self, number: int) -> HeldMessage:
        """Return a message in progress."""
        held = self.messages.get(number)
        if held is None:
            raise GroupAbortedError("the agent does not know the message any more: its group has been destroyed")
        return held

    @property
    def store(self) -> StoreClient:
        """The job's store."""
        return self._agent.store

    def execute(self, frame: Frame) -> bytes:
        """Execute a request whose form is JSON; return the document of the response.

        Raises:
            ProtocolError: there is no such request.
        """
        request = _REQUESTS.get(frame.header.kind)
        if request is None:
            raise ProtocolError(f"an attached process sent an unknown request, {frame.header.kind}")
        response = request(self, attach_frames.decode_json(frame.document))
        return b"" if response is None else attach_frames.encode_json(response)

    # Requests: each takes the request's document and returns the response's

    def abort(self, document: Json) -> Json:
        """End a group because of an error at the client, or the groups that are being made; return the failure."""
        error = error_from_json(document["error"], at_agent=True)
        if "group" not in document:
            self._agent.group_registry.abort_pending(error)
            return {}
        state = self._group_in(document).state
        state.abort(error)
        return {} if state.failure is None else error_to_json(state.failure)

    def cancel(self, document: Json) -> None:
        """Abandon messages that no thread of the client waits for any more."""
        error = error_from_json(document["error"], at_agent=True)
        for number in document["messages"]:
            held = self.messages.get(number)
            if held is not None:
                held.message.abandon(error)
                if not document.get("waited"):
                    self.messages.pop(number, None)

    def lost_ranks(self, document: Json) -> Json:
        """Return the errors of the ranks that have failed since the last such request."""
        return {"lost": [error_to_json(self._lost.popleft()) for _ in range(len(self._lost))]}

    def record_failure(self, document: Json) -> None:
        """Record an error that ended the client's process."""
        error = error_from_json(document["error"], at_agent=True)
        if isinstance(error, DistError):
            self._agent.record_failure(self._group_in(document), error)

    def new_group(self, document: Json) -> Json:
        """Make a group; return its description."""
        ranks = [int(rank) for rank in document["ranks"]]
        numbers = [int(rank) for rank in document.get("numbers", ranks)]
        group = self._agent.new_group(ranks, float(document["timeout"]), numbers)
        self._groups[group.id] = group
        return describe_group(group)

    def drop_group(self, document: Json) -> None:
        """End a group at this rank."""
        group = self._group_in(document)
        del self._groups[group.id]
        for number, held in self.messages.copy().items():
            if held.group is group:
                self.messages.pop(number, None)
        how = None
        if "reason" in document:
            failure = error_from_json(document["failure"], at_agent=True) if "failure" in document else None
            how = Goodbye(
                str(document["reason"]),
                failure=failure if isinstance(failure, DistError) else None,
                ranks=tuple(int(rank) for rank in document.get("named", ())),
            )
        self._agent.drop_group(group, how)

    def set_global_ranks(self, document: Json) -> None:
        """Change the ranks by which errors name the members; those of the world, if it has shrunk to this group."""
        if document.get("world"):
            self._agent.set_world(self._group_in(document))
        else:
            self._group_in(document).set_global_ranks(tuple(int(number) for number in document["numbers"]))

    def set_timeout(self, document: Json) -> None:
        """Change the default timeout of a group's calls."""
        self._group_in(document).set_timeout(float(document["timeout"]))

    def failure(self, document: Json) -> Json:
        """Return the first failure of a group, of all, or that names one of some ranks; nothing if there is none."""
        failure: DistError | None = self.ended()
        if failure is None and "group" in document:
            failure = self._group_in(document).failure
        elif failure is None and "naming" in document:
            failure = self._agent.failure_naming([int(rank) for rank in document["naming"]])
        elif failure is None:
            failure = self._agent.first_failure
        return {} if failure is None else error_to_json(failure)

    def verify(self, document: Json) -> None:
        """Compare the members' calls of an engine at the client, which executes them then.

        Raises:
            CollectiveMismatchError: they made different calls.
        """
        group, details = self._group_in(document), str(document["details"])
        if not isinstance(group.queue.backend, CustomBackend):
            group.use_custom_backend(str(document["engine"]), object())  # an HTTP client can make no call of it
        plan = group.queue.plan(key_from_json(document["call"]), lambda *_: None)
        group.queue.execute(plan, ((),), Options(float(document["seconds"]), details=lambda: details))

    def failed_ranks(self, document: Json) -> Json:
        """Return the other ranks that the first failure names."""
        return {"ranks": self._agent.failed_ranks}

    def num_waiting(self, document: Json) -> Json:
        """Return how many processes wait for the world to grow."""
        return {"count": self._agent.num_waiting(float(document["seconds"]))}

    def _group_in(self, document: Json) -> LocalCommunicator:
        return self.group(int(document["group"]))


_REQUESTS: dict[int, Callable[[Session, Json], Json | None]] = {
    Request.ABORT: Session.abort,
    Request.CANCEL: Session.cancel,
    Request.LOST_RANKS: Session.lost_ranks,
    Request.RECORD_FAILURE: Session.record_failure,
    Request.NEW_GROUP: Session.new_group,
    Request.DROP_GROUP: Session.drop_group,
    Request.SET_GLOBAL_RANKS: Session.set_global_ranks,
    Request.SET_TIMEOUT: Session.set_timeout,
    Request.FAILURE: Session.failure,
    Request.FAILED_RANKS: Session.failed_ranks,
    Request.VERIFY: Session.verify,
    Request.NUM_WAITING: Session.num_waiting,
}
