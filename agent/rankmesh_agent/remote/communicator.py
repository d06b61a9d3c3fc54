"""Communicator of an attached process, whose agent executes the calls."""

from __future__ import annotations

import contextlib
import itertools
import struct
from datetime import timedelta
from typing import Any

import numpy as np

from rankmesh_agent.collectives.link import Array, as_bytes
from rankmesh_agent.group.call_queue import CallQueue
from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.group.options import Options
from rankmesh_agent.group.work import MessageWork, Work
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.remote import codec
from rankmesh_agent.remote.backend import EngineBackend, RemoteBackend
from rankmesh_agent.remote.client import AgentClient
from rankmesh_agent.remote.codec import GroupDescription
from rankmesh_agent.remote.state import RemoteGroupState
from rankmesh_agent.wire import attach_frames
from rankmesh_agent.wire.attach_frames import BLOCKING, NO_OP, Request, Response
from rankmesh_agent.wire.dtypes import code_of
from rankmesh_agent.wire.errors import DistError
from rankmesh_agent.wire.ops import OpType

_SOURCE = struct.Struct("!q")
"""Document of the response to a received message: the sender's rank."""
_message_numbers = itertools.count(1)
"""Numbers of this process's messages in requests to the agent."""


class RemoteCommunicator(Communicator):
    """One attached process's side of a group.

    Args:
        client: of the agent.
        description: of the group.
    """

    state: RemoteGroupState

    def __init__(self, client: AgentClient, description: GroupDescription) -> None:
        super().__init__(description.id, description.name, description.ranks, client.member.rank, description.timeout)
        self._client = client
        self.state = RemoteGroupState(client, self.id, self.name, self.ranks)
        backend = RemoteBackend(client, self.id, self.rank, description.medium, self.state)
        self.queue = CallQueue(self.state, backend)
        self._submit = self.queue.submit

    @property
    def failure(self) -> DistError | None:
        if self.state.failure is None:
            return self._client.failure(group=self.id)
        return self.state.failure

    def set_global_ranks(self, global_ranks: tuple[int, ...]) -> None:
        if global_ranks != self.global_ranks:
            self._send_global_ranks(global_ranks, world=False)

    def become_world(self) -> None:
        """Have the agent take this group for the group of all ranks, to which the world has shrunk."""
        self._send_global_ranks(tuple(range(self.size)), world=True)

    def _send_global_ranks(self, global_ranks: tuple[int, ...], *, world: bool) -> None:
        document = {"group": self.id, "numbers": list(global_ranks), "world": world}
        self._client.request_json(Request.SET_GLOBAL_RANKS, document)
        super().set_global_ranks(global_ranks)

    def set_timeout(self, timeout: timedelta | float) -> None:
        super().set_timeout(timeout)
        # It is also the default of calls and groups that HTTP clients request from the agent.
        self._client.request_json(Request.SET_TIMEOUT, {"group": self.id, "timeout": self.timeout})

    def use_custom_backend(self, name: str, engine: Any) -> None:
        """See Communicator. The engine runs in this process, once the agent has compared the members' calls."""
        self.use_backend(EngineBackend(name, engine, self._client, self.id, self.state))

    def empty(self, dtype: np.dtype[Any], count: int, options: Options) -> Array:
        """See Communicator; the agent takes part in the call, and the array is memory of this process alone."""
        if self.queue.backend.allocates:
            self.queue.submit((OpType.EMPTY, dtype, count), (count,), options)
        return np.empty(count, dtype)

    def close(self) -> None:
        """End the group at this process: queued calls fail, the worker ends."""
        self.state.mark_destroyed()
        self.queue.close()

    # Point-to-point

    def send(self, array: Array, rank: int, tag: int, options: Options) -> Work | None:
        return self._message(Request.SEND, array, rank, tag, options).work()

    def receive(self, array: Array, rank: int, tag: int, options: Options) -> Work | int:
        message = self._message(Request.RECEIVE, array, rank, tag, options)
        work = message.work()
        return message.source if work is None else work

    def _message(self, kind: Request, array: Array, rank: int, tag: int, options: Options) -> _Message:
        self.state.raise_if_failed()
        return _Message(self._client, kind, self.id, array, rank, tag, options)


class _Message:
    """A point-to-point message that the agent begins to transfer, and unless it is asynchronous completes.

    Args:
        client: of the agent.
        kind: SEND or RECEIVE.
        group: id of the group.
        array: to send, or to receive into.
        rank, tag, options: see Communicator.
    """

    def __init__(
        self, client: AgentClient, kind: Request, group: int, array: Array, rank: int, tag: int, options: Options
    ) -> None:
        received, sent = ([array], []) if kind == Request.RECEIVE else ([], [array])
        self._client = client
        self._group = group
        self._down = [as_bytes(each) for each in received]
        self._options = options
        self._deadline = Deadline(options.timeout)
        self._number = next(_message_numbers)
        self._done = False
        self.source = -1
        outputs, inputs = tuple(each.size for each in received), tuple(each.size for each in sent)
        dtype, seconds, blocking = code_of(array.dtype), options.timeout, not options.async_op
        call = attach_frames.Call(group, seconds, tag, self._number, rank, 0, NO_OP, dtype, outputs, inputs)
        up = [as_bytes(each) for each in sent]
        self._request(kind, call, seconds if blocking else 0.0, up, blocking=blocking)

    def wait(self, deadline: Deadline | None) -> bool:
        """See PendingMessage."""
        if self._done:
            return True
        own = deadline is self._deadline
        seconds = -1.0 if deadline is None else deadline.remaining()
        call = attach_frames.Call(0, seconds, 0, self._number, 0, 0, NO_OP, 0, (), ())
        return self._request(Request.WAIT, call, max(seconds, 0.0), [], blocking=own)

    def _request(
        self, kind: Request, call: attach_frames.Call, seconds: float, up: list[memoryview], *, blocking: bool
    ) -> bool:
        document, flags = attach_frames.encode_call(call), BLOCKING if blocking else 0
        at_agent: list[BaseException] = []
        try:
            frame = self._client.request(
                kind, document, seconds, up=up, down=self._down, flags=flags, on_error=at_agent.append
            )
        except BaseException as error:
            if not at_agent:  # Ctrl-C, say: no thread will wait for the message any more
                failure = codec.error_to_json(error)
                with contextlib.suppress(DistError):  # the agent is gone, and the message with it
                    cancelled = {"messages": [self._number], "error": failure, "waited": blocking}
                    self._client.request_json(Request.CANCEL, cancelled)
            raise
        if frame.header.kind == Response.PENDING:
            return False
        if frame.document:
            (self.source,) = _SOURCE.unpack(frame.document)
        self._done = True
        if self._options.on_complete is not None:
            self._options.on_complete()
        return True

    def work(self) -> Work | None:
        """Return the Work of an asynchronous message."""
        if not self._options.async_op:
            return None
        source = (lambda: self.source) if self._down else None
        return MessageWork(self.wait, self._options.result, self._deadline, source)
