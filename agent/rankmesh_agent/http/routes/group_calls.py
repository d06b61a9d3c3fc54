"""Group calls for HTTP clients: off the event loop, within their timeout, and only while the client is connected.

A collective goes into its group's queue, behind the calls of the rank's own process, and one thread per group runs the
queue. A message waits in a thread of its own, and the number of these is limited.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated, Any, TypeVar, cast

from anyio import CapacityLimiter, to_thread
from fastapi import Depends, Path, Query, Request
from starlette.requests import ClientDisconnect

from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.group.messages import PendingMessage
from rankmesh_agent.group.options import Options
from rankmesh_agent.group.work import Work
from rankmesh_agent.http.routes.dependencies import AgentDep
from rankmesh_agent.http.routes.tensor_io import InvalidCallError
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.wire.errors import CollectiveTimeoutError, DistBackendError, DistError, GroupAbortedError
from rankmesh_agent.wire.fields import MAX_SECONDS

T = TypeVar("T")

MAX_WAITERS = 64
"""Limit of the sends, and of the receives, that wait at a time, and of the groups that are being created."""


class GroupNotFoundError(DistError, code="group-not-found", status=404):
    """The rank is in no group with this id or name."""


class MessageMismatchError(DistBackendError, code="message-mismatch", status=409):
    """A message and its receive differ in dtype or size."""


class TooManyCallsError(DistError, code="too-many-calls", status=503):
    """There are MAX_WAITERS calls of a kind already."""

    retryable = True


class CallSlots:
    """Slots of the calls that wait for clients, and of probes. For one event loop."""

    def __init__(self) -> None:
        self._taken: Counter[str] = Counter()

    @contextlib.contextmanager
    def hold(self, kind: str, most: int = 0, error: type[DistError] = TooManyCallsError) -> Iterator[None]:
        """Hold a slot of a kind of calls, one of MAX_WAITERS by default; raise the error if all are taken."""
        if self._taken[kind] >= (most or MAX_WAITERS):
            raise error(f"{most or MAX_WAITERS} {kind}s are under way at this agent already; retry later")
        self._taken[kind] += 1
        try:
            yield
        finally:
            self._taken[kind] -= 1


class GroupCaller:
    """Makes the group call of a request, whose body has been received by then."""

    def __init__(self, request: Request, group: LocalCommunicator, timeout: float) -> None:
        self._op = request.url.path.rpartition("/")[2]
        self.group = group
        self._request = request
        self._timeout = timeout
        self._slots: CallSlots = request.app.state.slots

    def group_rank(self, rank: int | None, name: str) -> int:
        """Return the group rank of a global rank in the query; raise InvalidCallError unless it is a member."""
        ranks = self.group.global_ranks
        if rank is None:
            raise InvalidCallError(f"{name} is missing: give a rank, ?{name}={ranks[0]}", group=self.group.name)
        if rank not in ranks:
            raise InvalidCallError(
                f"{name}={rank} is not in group {self.group.name!r}, whose ranks are {list(ranks)}",
                group=self.group.name,
            )
        return ranks.index(rank)

    def peer_rank(self, rank: int | None, name: str) -> int:
        """Return the mesh's number of another member, a global rank in the query; raise InvalidCallError for others."""
        place = self.group_rank(rank, name)
        if place == self.group.rank:
            raise InvalidCallError(f"{name}={rank} is this agent's own rank", group=self.group.name)
        return self.group.ranks[place]

    async def collective(self, make: Callable[[Options], Work | None], note: str = "") -> None:
        """Queue a collective call by ``make``, and wait until it has completed; ``note`` is for errors of other calls.

        Raises:
            DistError: the call failed.
            ClientDisconnect: the client disconnected; the group is aborted if the call had begun.
        """
        deadline = Deadline(self._timeout)
        origin = f"over HTTP{', ' if note else ''}{note}"
        options = Options(self._timeout, async_op=True, details=lambda: origin, deadline=deadline)
        with self._error_context():
            work = cast(Work, await asyncio.to_thread(self._start, make, options))
            try:
                await until_disconnect(self._request, self._completion(work))
            except ClientDisconnect:
                await asyncio.to_thread(self._abandon, work)
                raise

    async def message(self, begin: Callable[[Options], Any]) -> Work:
        """Start a message, and wait until it has completed.

        Raises:
            DistError: the message failed, or too many wait already.
            ClientDisconnect: the client disconnected; the message is abandoned.
        """
        options = Options(self._timeout, async_op=True)

        def begun() -> tuple[Work, bool]:
            work = cast(Work, self._start(begin, options))
            return work, work.is_completed()

        with self._slots.hold(self._op), self._error_context():
            work, is_completed = await asyncio.to_thread(begun)
            if not is_completed:
                try:
                    await until_disconnect(self._request, in_thread(work.wait))
                except ClientDisconnect:
                    await asyncio.to_thread(cast(PendingMessage, work.message).abandon, self._disconnect_error())
                    raise
            work.wait()
            return work

    def _start(self, make: Callable[[Options], Any], options: Options) -> Any:
        """Start a call, after the frames that have arrived are processed: the group may have ended by one."""
        self.group.engine.progress()
        return make(options)

    async def _completion(self, work: Work) -> None:
        """Wait until a call has completed; withdraw one that has not begun within its timeout."""
        ended = asyncio.ensure_future(work)
        try:
            await asyncio.wait({ended}, timeout=self._timeout)
            if not ended.done():
                work.withdraw(self._queue_timeout_error())
            await ended
        finally:
            ended.cancel()

    def _abandon(self, work: Work) -> None:
        """Withdraw the call of a client that has disconnected; if the call has begun, abort the group."""
        if not work.withdraw(GroupAbortedError("its HTTP client went away")) and not work.is_completed():
            self.group.abort(self._disconnect_error(self.group.info().seq))

    def _disconnect_error(self, seq: int | None = None) -> GroupAbortedError:
        rank = self.group.global_ranks[self.group.rank]
        call = self._op if seq is None else f"{self._op} #{seq}"
        text = f"the HTTP client of rank {rank} went away during {call}"
        return GroupAbortedError(text, ranks=[rank], op=self._op, group=self.group.name, seq=seq)

    def _queue_timeout_error(self) -> CollectiveTimeoutError:
        error = CollectiveTimeoutError(
            f"{self._op} in group {self.group.name!r} waited {self._timeout:.1f} s for its turn, and was not begun: "
            "the rank's earlier calls have not completed",
            op=self._op,
            group=self.group.name,
        )
        error.retryable = True
        return error

    @contextlib.contextmanager
    def _error_context(self) -> Iterator[None]:
        """Add the operation, the group and the group's earlier failure to errors."""
        earlier = self.group.failure
        try:
            yield
        except DistError as caught:
            error = caught
            if type(caught) is DistBackendError and self._op in ("send", "recv"):
                error = MessageMismatchError(caught.message, **caught.details())
            error.op = error.op or self._op
            error.group = error.group or self.group.name
            if earlier is not None:
                error.first_failure = earlier.message
            raise error from None


async def in_thread(blocking: Callable[[], T]) -> T:
    """Return the result of a function that waits, in a thread of its own, which is left alone if this is cancelled."""
    return await to_thread.run_sync(blocking, abandon_on_cancel=True, limiter=CapacityLimiter(1))


async def until_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Return the result of ``work``; cancel it and raise ClientDisconnect when the client goes, after the body."""
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(request.receive())  # after the body, only a disconnect can come
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        disconnect.cancel()


GroupName = Annotated[
    str, Path(alias="group_id", max_length=255, description="The group's id, 16 hexadecimal digits, or its name.")
]
Timeout = Annotated[
    float | None,
    Query(
        gt=0, le=MAX_SECONDS, description="The call's timeout in seconds, from its body on; the group's if left out."
    ),
]


async def _group(group_id: GroupName, agent: AgentDep) -> LocalCommunicator:
    found = agent.group_registry.find(group_id)
    if found is None:
        raise GroupNotFoundError(
            f"this rank is in no group {group_id!r}; /v1/groups lists those it is in", group=group_id
        )
    return found


GroupDep = Annotated[LocalCommunicator, Depends(_group)]


async def _caller(request: Request, group: GroupDep, timeout: Timeout = None) -> GroupCaller:
    return GroupCaller(request, group, group.timeout if timeout is None else timeout)


CallerDep = Annotated[GroupCaller, Depends(_caller)]
