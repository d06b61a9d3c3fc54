"""Communicator of an attached process, whose agent executes the calls."""

from __future__ import annotations

import contextlib
import itertools
from datetime import timedelta
from typing import Any

import numpy as np

from rankmesh_agent.collectives.link import Array, as_bytes
from rankmesh_agent.group.call_queue import CallQueue
from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.group.options import Options
from rankmesh_agent.group.work import Work
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.remote.backend import EngineBackend, RemoteBackend, RemoteGroupState
from rankmesh_agent.remote.calls import Cancel, Message, Wait
from rankmesh_agent.remote.client import AgentClient
from rankmesh_agent.remote.codec import GroupDescription, error_data
from rankmesh_agent.remote.requests import Failure, Request, SetGlobalRanks, SetTimeout
from rankmesh_agent.wire.dtypes import code_of
from rankmesh_agent.wire.errors import DistError
from rankmesh_agent.wire.ops import OpType

_message_numbers = itertools.count(1)


class RemoteCommunicator(Communicator):
    """One attached process's side of a group."""

    state: RemoteGroupState

    def __init__(self, client: AgentClient, description: GroupDescription) -> None:
        super().__init__(description.id, description.name, description.ranks, client.member.rank, description.timeout)
        self._client = client
        self.state = RemoteGroupState(client, self.id, self.name, self.ranks)
        backend = RemoteBackend(self.state, self.rank, description.medium)
        self.queue = CallQueue(self.state, backend)
        self.submit = self.queue.submit

    @property
    def failure(self) -> DistError | None:
        if self.state.failure is None:
            return self._client.failure(Failure(self.id))
        return self.state.failure

    def set_global_ranks(self, global_ranks: tuple[int, ...]) -> None:
        if global_ranks != self.global_ranks:
            self._send_global_ranks(global_ranks, world=False)

    def become_world(self) -> None:
        """Have the agent take this group for the group of all ranks, to which the world has shrunk."""
        self._send_global_ranks(tuple(range(self.size)), world=True)

    def _send_global_ranks(self, global_ranks: tuple[int, ...], *, world: bool) -> None:
        self._client.ask(SetGlobalRanks(self.id, list(global_ranks), world))
        super().set_global_ranks(global_ranks)

    def set_timeout(self, timeout: timedelta | float) -> None:
        super().set_timeout(timeout)
        # It is also the default of calls and groups that HTTP clients request from the agent.
        self._client.ask(SetTimeout(self.id, self.timeout))

    def use_custom_backend(self, name: str, engine: Any) -> None:
        """See Communicator. The engine runs in this process, once the agent has compared the members' calls."""
        self.use_backend(EngineBackend(name, engine, self.state))

    def empty(self, dtype: np.dtype[Any], count: int, options: Options) -> Array:
        """See Communicator; the agent takes part in the call, and the array is memory of this process alone."""
        if self.queue.backend.allocates:
            self.queue.submit((OpType.EMPTY, dtype, count), (dtype, count), options)
        return np.empty(count, dtype)

    def close(self) -> None:
        """End the group at this process: queued calls fail, the worker ends."""
        self.state.mark_destroyed()
        self.queue.close()

    # Point-to-point

    def send(self, array: Array, rank: int, tag: int, options: Options) -> Work | None:
        return self._message(array, rank, tag, options, sends=True).work()

    def receive(self, array: Array, rank: int, tag: int, options: Options) -> Work | int:
        message = self._message(array, rank, tag, options, sends=False)
        work = message.work()
        return message.result if work is None else work

    def _message(self, array: Array, rank: int, tag: int, options: Options, *, sends: bool) -> _Message:
        self.state.raise_if_failed()
        seconds, blocking = options.timeout, not options.async_op
        shape = code_of(array.dtype), array.size
        request = Message(self.id, next(_message_numbers), sends, rank, tag, *shape, seconds, blocking)
        return _Message(self._client, request, array, options)


class _Message:
    """A point-to-point message, see work.Message, that the agent transfers; the result is that of the request."""

    def __init__(self, client: AgentClient, request: Message, array: Array, options: Options) -> None:
        self._client = client
        self._message = request
        self._options = options
        self.op = "send" if request.sends else "recv"
        self.deadline = Deadline(options.timeout)
        self._done = False
        self.result = -1
        view = [as_bytes(array)]
        up, self._down = (view, []) if request.sends else ([], view)
        self._ask(request, request.seconds if request.blocking else 0.0, up, blocking=request.blocking)

    def source(self) -> int:
        return self.result

    def complete(self, deadline: Deadline | None) -> bool:
        if not self._done:
            own = deadline is self.deadline
            seconds = None if deadline is None else deadline.remaining()
            self._ask(Wait(self._message.number, seconds, own), seconds or 0.0, [], blocking=own)
        return self._done

    def _ask(self, request: Request[int | None], seconds: float, up: list[memoryview], *, blocking: bool) -> None:
        try:
            result = self._client.ask(request, seconds, up=up, down=self._down)
        except DistError:  # the agent has ended the message, if it has to
            raise
        except BaseException as error:  # Ctrl-C, say: no thread will wait for the message any more
            with contextlib.suppress(DistError):  # the agent is gone, and the message with it
                self._client.ask(Cancel(self._message.number, error_data(error), blocking))
            raise
        if result is None:
            return
        self.result = result
        self._done = True
        if self._options.on_complete is not None:
            self._options.on_complete()

    def work(self) -> Work | None:
        """Return the Work of an asynchronous message."""
        return Work(self.op, self._options.result, message=self) if self._options.async_op else None
