"""Making a rank's call for a client: without holding up the event loop, within its time, and only while it is there.

A collective goes into its group's queue, behind what the rank's own process has begun, and one thread a group carries
them out one after the other. A message is waited for in a thread of its own, and there are so many of these.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, cast

from fastapi import Depends, Path, Query, Request
from starlette.requests import ClientDisconnect

from rankmesh_agent.group.call_queue import Options
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.group.work import MessageWork, QueuedWork, Work
from rankmesh_agent.http.routes.dependencies import AgentDep
from rankmesh_agent.http.routes.tensor_io import InvalidCallError
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.wire.errors import (
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    GroupAbortedError,
)

MAX_WAITERS = 64
"""How many sends, and how many receives, may be waited for at a time, and how many groups may be in the making."""
_DAY = 86_400.0


class GroupNotFoundError(DistError):
    """The rank is in no group with this id or name."""

    code = "group-not-found"
    status = 404


class MessageMismatchError(DistBackendError):
    """A message and the receive that was to take it differ in dtype or size."""

    code = "message-mismatch"
    status = 409


class TooManyCallsError(DistError):
    """As many calls are waited for as may be."""

    code = "too-many-calls"
    status = 503
    retryable = True


class WaiterThreads:
    """Threads that wait on behalf of clients: as many of each kind as there may be.

    They are daemons: who waits for something does not keep the process from ending.
    """

    def __init__(self) -> None:
        self._free: dict[str, threading.BoundedSemaphore] = {}

    def acquire(self, kind: str) -> threading.BoundedSemaphore:
        """Take the place of a thread, to be released or given to ``run``.

        Raises:
            TooManyCallsError: too many of the kind are under way.
        """
        free = self._free.setdefault(kind, threading.BoundedSemaphore(MAX_WAITERS))
        if not free.acquire(blocking=False):
            raise TooManyCallsError(f"{MAX_WAITERS} {kind}s are waited for at this agent already; ask again later")
        return free

    async def run(
        self, free: threading.BoundedSemaphore, blocking: Callable[[], Any], gone: asyncio.Future[Any]
    ) -> bool:
        """Call something that blocks, which sees to its outcome itself; return whether it ended before ``gone`` did.

        Args:
            free: the place that was taken for it; it is released in the end.
            blocking: what to call.
            gone: whoever it is for has gone.
        """
        loop = asyncio.get_running_loop()
        over = loop.create_future()

        def call() -> None:
            try:
                blocking()
            finally:
                free.release()
                _resolve_threadsafe(loop, over)

        threading.Thread(target=call, name="rankmesh-http-call", daemon=True).start()
        await asyncio.wait({over, gone}, return_when=asyncio.FIRST_COMPLETED)
        return over.done()


class GroupCaller:
    """Makes the calls of a request.

    Args:
        request: whose client they are for; its body has been received when they are made.
        group: whose calls they are.
        timeout: seconds they may take.
    """

    def __init__(self, request: Request, group: LocalCommunicator, timeout: float) -> None:
        self.group = group
        self._request = request
        self._timeout = timeout
        self._threads: WaiterThreads = request.app.state.threads

    def group_rank(self, rank: int | None, name: str) -> int:
        """Return the group rank of a rank that the client names globally.

        Raises:
            InvalidCallError: it names none, or one that is not a member.
        """
        ranks = self.group.global_ranks
        if rank is None:
            raise InvalidCallError(f"{name} is missing: say which rank, ?{name}={ranks[0]}", group=self.group.name)
        if rank not in ranks:
            raise InvalidCallError(
                f"{name}={rank} is not in group {self.group.name!r}, whose ranks are {list(ranks)}",
                group=self.group.name,
            )
        return ranks.index(rank)

    def peer_rank(self, rank: int | None, name: str) -> int:
        """Return the mesh's number of another rank that the client names globally.

        Raises:
            InvalidCallError: it names none, one that is not a member, or this one.
        """
        place = self.group_rank(rank, name)
        if place == self.group.rank:
            raise InvalidCallError(f"{name}={rank} is this agent's own rank", group=self.group.name)
        return self.group.ranks[place]

    async def collective(self, op: str, make: Callable[[Options], Work | None], note: str = "") -> None:
        """Make a collective call, and wait until it is over.

        Args:
            op: its name.
            make: queues it.
            note: what else there is to say of it when the ranks' calls do not fit together.

        Raises:
            DistError: it failed.
            ClientDisconnect: the client went away; the group is given up if the call had begun.
        """
        deadline = Deadline(self._timeout)
        words = f"over HTTP{', ' if note else ''}{note}"
        options = Options(self._timeout, async_op=True, details=lambda: words, deadline=deadline)
        with self._error_context(op):
            work = cast(QueuedWork, await asyncio.to_thread(self._start, make, options))
            loop = asyncio.get_running_loop()
            over = loop.create_future()
            work.get_future().then(lambda _: _resolve_threadsafe(loop, over))
            async with _ClientDisconnect(self._request) as gone:
                await asyncio.wait({over, gone}, timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED)
                if not over.done() and not gone.done():
                    work.withdraw(self._queue_timeout_error(op))
                    await asyncio.wait({over, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not over.done():
                    await asyncio.to_thread(self._abandon, work, op)
                    raise ClientDisconnect
            work.wait()

    async def message(self, op: str, begin: Callable[[Options], Any]) -> MessageWork:
        """Begin a message, and wait until it is there.

        Args:
            op: ``send`` or ``recv``.
            begin: begins it.

        Raises:
            DistError: it failed.
            TooManyCallsError: too many are waited for; it was not begun.
            ClientDisconnect: the client went away; the message is given up.
        """
        options = Options(self._timeout, async_op=True)
        free = self._threads.acquire(op)

        def begun() -> tuple[MessageWork, bool]:
            work = cast(MessageWork, self._start(begin, options))
            return work, work.is_completed()

        with self._error_context(op):
            try:
                work, done = await asyncio.to_thread(begun)
            except BaseException:
                free.release()
                raise
            if done:
                free.release()
            else:
                await self._wait_in_thread(work, op, free)
            work.wait()
            return work

    def _start(self, make: Callable[[Options], Any], options: Options) -> Any:
        """Begin a call, once it is known what the other ranks have said until now: that the group has ended, say."""
        self.group.engine.progress()
        return make(options)

    async def _wait_in_thread(self, work: MessageWork, op: str, free: threading.BoundedSemaphore) -> None:
        def wait() -> None:
            with contextlib.suppress(DistError):  # raised once more where it is asked for
                work.wait()

        async with _ClientDisconnect(self._request) as gone:
            if not await self._threads.run(free, wait, gone):
                await asyncio.to_thread(work.abandon, self._disconnect_error(op))
                raise ClientDisconnect

    def _abandon(self, work: QueuedWork, op: str) -> None:
        """Take back a call whose client has gone; if it has begun, the others are told."""
        if not work.withdraw(GroupAbortedError("its HTTP client went away")) and not work.is_completed():
            self.group.abort(self._disconnect_error(op, self.group.info().seq))

    def _disconnect_error(self, op: str, seq: int | None = None) -> GroupAbortedError:
        rank = self.group.global_ranks[self.group.rank]
        words = op if seq is None else f"{op} #{seq}"
        text = f"the HTTP client of rank {rank} went away during {words}"
        return GroupAbortedError(text, ranks=[rank], op=op, group=self.group.name, seq=seq)

    def _queue_timeout_error(self, op: str) -> CollectiveTimeoutError:
        error = CollectiveTimeoutError(
            f"{op} in group {self.group.name!r} waited {self._timeout:.1f} s for its turn, and was not begun: the "
            "rank's earlier calls are not over",
            op=op,
            group=self.group.name,
        )
        error.retryable = True
        return error

    @contextlib.contextmanager
    def _error_context(self, op: str) -> Iterator[None]:
        """Have errors say whose and which call failed, and what had ended the group before."""
        earlier = self.group.failure
        try:
            yield
        except DistError as caught:
            error = caught
            if type(caught) is DistBackendError and op in ("send", "recv"):
                error = MessageMismatchError(caught.message, **caught.details())
            error.op = error.op or op
            error.group = error.group or self.group.name
            if earlier is not None:
                error.first_failure = earlier.message
            raise error from None


class _ClientDisconnect:
    """A future that is done when the request's client has gone; the body has been received."""

    def __init__(self, request: Request) -> None:
        self._request = request

    async def __aenter__(self) -> asyncio.Future[Any]:
        self._hang_up = asyncio.ensure_future(self._request.receive())
        return self._hang_up

    async def __aexit__(self, *_: object) -> None:
        self._hang_up.cancel()


client_disconnect = _ClientDisconnect
"""``async with leaving(request) as gone``: a future that is done when the client has hung up."""


def _resolve_threadsafe(loop: asyncio.AbstractEventLoop, over: asyncio.Future[None]) -> None:
    """Say from another thread that something is over."""

    def say() -> None:
        if not over.done():
            over.set_result(None)

    with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
        loop.call_soon_threadsafe(say)


GroupName = Annotated[
    str, Path(alias="group_id", max_length=255, description="The group's id, 16 hexadecimal digits, or its name.")
]
Timeout = Annotated[
    float | None,
    Query(gt=0, le=_DAY, description="Seconds the call may take once its body has come; the group's if left out."),
]


async def _group(group_id: GroupName, agent: AgentDep) -> LocalCommunicator:
    found = agent.group(group_id)
    if found is None:
        raise GroupNotFoundError(
            f"this rank is in no group {group_id!r}; /v1/groups lists those it is in", group=group_id
        )
    return found


GroupDep = Annotated[LocalCommunicator, Depends(_group)]
"""The group that the path names."""


async def _caller(request: Request, group: GroupDep, timeout: Timeout = None) -> GroupCaller:
    return GroupCaller(request, group, group.timeout if timeout is None else timeout)


CallerDep = Annotated[GroupCaller, Depends(_caller)]
"""Makes calls of the group that the path names."""


def check_query_parameters(request: Request, known: Sequence[str]) -> None:
    """Refuse a query with a parameter that would be ignored: it may be a mistyped one.

    Raises:
        InvalidCallError: there is one.
    """
    unknown = sorted(set(request.query_params) - set(known))
    if unknown:
        raise InvalidCallError(f"this call has no parameter {unknown[0]!r}; it has {', '.join(known)}")
