"""A group of an attached process: its calls are made by the agent, or over memory that the agent has lent."""

from __future__ import annotations

import contextlib
import itertools
import struct
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from rankmesh_agent.backends.base import Backend
from rankmesh_agent.backends.cpu import CpuBackend
from rankmesh_agent.collectives.link import Array, as_bytes
from rankmesh_agent.group.call_queue import CallQueue, Options
from rankmesh_agent.group.communicator import Communicator
from rankmesh_agent.group.pending import OnComplete
from rankmesh_agent.group.work import MessageWork, Work
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.remote import codec
from rankmesh_agent.remote.backend import RemoteBackend
from rankmesh_agent.remote.codec import GroupDescription
from rankmesh_agent.remote.state import RemoteActiveCall, RemoteGroupState, RemoteLink
from rankmesh_agent.transports.segment import Segment
from rankmesh_agent.transports.shared_memory import Mapping
from rankmesh_agent.wire import attach_frames
from rankmesh_agent.wire.attach_frames import BLOCKING, NO_OP, Request, Response
from rankmesh_agent.wire.dtypes import code_of
from rankmesh_agent.wire.errors import DistError
from rankmesh_agent.wire.ops import OpType

if TYPE_CHECKING:
    from rankmesh_agent.remote.agent import RemoteAgent

_NUMBER = struct.Struct("!q")
_numbers = itertools.count(1)
"""What this process's messages are called."""


class RemoteCommunicator(Communicator):
    """One attached process's side of a group.

    Where all members share one memory, and this process does, too, the agent lends it: then the collectives are made
    here, as an agent in this process would make them, and the agent is asked only whether those that are waited for
    are still there. Elsewhere, and for messages, it is the agent that makes the calls.

    Args:
        agent: this process's.
        told: what it said of the group.
        descriptors: what came along; this object closes them.
    """

    state: RemoteGroupState

    def __init__(self, agent: RemoteAgent, told: GroupDescription, descriptors: list[int]) -> None:
        super().__init__(told.id, told.name, told.ranks, agent.member.rank, told.timeout)
        self._agent = agent
        self.state = RemoteGroupState(agent, told.id, told.name, self.ranks, runs_locally=told.segment is not None)
        self.active_call = RemoteActiveCall(agent, told.id, self.state)
        self.link = RemoteLink(agent, self.active_call, self.rank, self.size)
        backend = RemoteBackend(agent, told.id, self.rank, told.medium, self.active_call, self.state)
        self._reported: float | None = None
        self.queue = CallQueue(self.state, self.active_call, told.name, backend)
        self._submit = self.queue.submit
        self._segment: Segment | None = None
        if told.segment is not None:
            mapping = Mapping.from_descriptor(descriptors.pop(), told.segment.size)
            self._segment = Segment(mapping, self.rank, self.size, told.segment.slot_bytes, told.segment.oversubscribed)

    def start(self, timeout: float) -> None:
        """Finish what the agent has begun: what the members do first over the memory that they share.

        Raises:
            DistBackendError: a member is missing, or failed.
        """
        if self._segment is None:
            return
        self.queue.use_backend(CpuBackend(self.link, self._segment))
        self.set_up(lambda shared: shared.windows.probe_reads(), timeout)

    @property
    def failure(self) -> DistError | None:
        if self.state.failure is None:
            return self._agent.group_failure(self.id)
        return self.state.failure

    @property
    def global_ranks(self) -> tuple[int, ...]:
        return self.state.global_ranks

    @global_ranks.setter
    def global_ranks(self, global_ranks: tuple[int, ...]) -> None:
        if global_ranks != self.state.global_ranks:
            said = {"group": self.id, "numbers": list(global_ranks)}
            self._agent.request(Request.SET_GLOBAL_RANKS, attach_frames.encode_json(said), 0.0)
            self.state.global_ranks = global_ranks

    def set_timeout(self, timeout: timedelta | float) -> None:
        super().set_timeout(timeout)
        # It is the default of calls and groups that somebody asks the agent for over HTTP, too.
        said = {"group": self.id, "timeout": self.timeout}
        self._agent.request(Request.SET_TIMEOUT, attach_frames.encode_json(said), 0.0)

    def use_backend(self, backend: Backend) -> None:
        """See Communicator; this process executes the calls itself then, and reports them to the agent."""
        if not backend.device:
            self.state.runs_locally = True
            self._agent.start_reporting()
        super().use_backend(backend)

    def report(self) -> list[Any] | None:
        """Return what the agent is to know of the calls that this process makes itself; None if nothing is new."""
        if not self.state.runs_locally:
            return None
        ended, begun = self.state.recorder.drain(), self.state.started_at
        if not ended and begun == self._reported:
            return None
        self._reported = begun
        return codec.report_to_json(self.queue, self.state, ended)

    def fail(self, failure: DistError) -> None:
        """Take note of a failure that the agent knows of, or that it is gone: the next call raises it."""
        if self.state.failure is None:
            self.state.failure = failure

    def empty(self, dtype: np.dtype[Any], count: int, options: Options) -> Array:
        if self.queue.backend.allocates:
            settings = self._agent.settings
            return self._registered_array(dtype, count, options, settings.shm_dir, settings.job)
        if not self.state.runs_locally:
            self.queue.submit((OpType.EMPTY, dtype, count), (count,), options)
        return np.empty(count, dtype)

    def close(self) -> None:
        """End the group at this process: queued calls fail, the worker ends."""
        self.state.mark_destroyed()
        self.queue.close()
        self._segment = None

    # Point-to-point

    def send(self, array: Array, rank: int, tag: int, options: Options) -> Work | None:
        return self._message(Request.SEND, array, rank, tag, options).follow_up(options)

    def receive(self, array: Array, rank: int, tag: int, options: Options) -> Work | int:
        message = self._message(Request.RECEIVE, array, rank, tag, options)
        work = message.follow_up(options)
        return message.source if work is None else work

    def _message(self, kind: Request, array: Array, rank: int, tag: int, options: Options) -> _Message:
        self.state.raise_if_failed()
        message = _Message(self._agent, array if kind == Request.RECEIVE else None, options)
        message.begin(kind, self.id, array, rank, tag, waits=not options.async_op)
        return message


class _Message:
    """A point-to-point message that the agent carries."""

    def __init__(self, agent: RemoteAgent, array: Array | None, options: Options) -> None:
        self._agent = agent
        self._down = [] if array is None else [as_bytes(array)]
        self._after: OnComplete = options.on_complete
        self._deadline = Deadline(options.timeout)
        self._number = next(_numbers)
        self._done = False
        self.source = -1

    def begin(self, kind: Request, group: int, array: Array, rank: int, tag: int, *, waits: bool) -> None:
        """Have the agent begin, and if it is to be waited for, wait."""
        outputs, inputs = ((array.size,), ()) if self._down else ((), (array.size,))
        seconds = self._deadline.seconds
        call = attach_frames.Call(
            group, seconds, tag, self._number, rank, 0, NO_OP, code_of(array.dtype), outputs, inputs
        )
        up = [] if self._down else [as_bytes(array)]
        self._ask(kind, call, seconds if waits else 0.0, up, waits=waits)

    def settle(self, deadline: Deadline | None) -> bool:
        """See Message.settle."""
        if self._done:
            return True
        own = deadline is self._deadline
        seconds = -1.0 if deadline is None else deadline.remaining()
        call = attach_frames.Call(0, seconds, 0, self._number, 0, 0, NO_OP, 0, (), ())
        return self._ask(Request.WAIT, call, max(seconds, 0.0), [], waits=own)

    def _ask(
        self, kind: Request, call: attach_frames.Call, seconds: float, up: list[memoryview], *, waits: bool
    ) -> bool:
        heard: list[BaseException] = []
        try:
            frame = self._agent.request(
                kind,
                attach_frames.encode_call(call),
                seconds,
                up=up,
                down=self._down,
                flags=BLOCKING if waits else 0,
                heard=heard.append,
            )
        except BaseException as error:
            if not heard:  # Ctrl-C, say: nobody will wait for the message any more
                self._cancel(error, waited=waits)
            raise
        if frame.header.kind == Response.PENDING:
            return False
        if frame.document:
            (self.source,) = _NUMBER.unpack(frame.document)
        self._done = True
        if self._after is not None:
            self._after()
            self._after = None
        return True

    def _cancel(self, error: BaseException, *, waited: bool) -> None:
        said = {"messages": [self._number], "error": codec.error_to_json(error), "waited": waited}
        with contextlib.suppress(DistError):  # the agent is gone, and the message with it
            self._agent.control(Request.CANCEL, said)

    def follow_up(self, options: Options) -> Work | None:
        """Return what the user waits for."""
        if not options.async_op:
            return None
        source = (lambda: self.source) if self._down else None
        return MessageWork(self.settle, options.result, self._deadline, source)
