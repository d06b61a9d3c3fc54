"""The store of the process that owns the keys and values, for callers with an event loop, and without one."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import Future
from typing import Any, TypeVar

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.store import codec
from rankmesh_agent.store.base import AsyncStore, BlockingStore, KeyWaitInfo
from rankmesh_agent.store.change_log import ChangeLog
from rankmesh_agent.store.command import Command, Immediate, Waiting
from rankmesh_agent.store.commands import QueuePop
from rankmesh_agent.store.idempotency import ReplyCache
from rankmesh_agent.store.key_waits import KeyWaits
from rankmesh_agent.store.ownership import Ownership
from rankmesh_agent.store.records import RequestId
from rankmesh_agent.store.table import UNLIMITED, Quota, Table
from rankmesh_agent.wire import store_frames
from rankmesh_agent.wire.errors import DistError, IdempotencyKeyReusedError

_KEY_PREFIX = b"Idempotency-Key: "

T = TypeVar("T")


class MemoryStore(AsyncStore):
    """Keys and values in this process, for several threads and event loops at a time.

    Args:
        quota: limits of the keys and values.

    Attributes:
        table: the same keys and values for callers without an event loop: BlockingMemoryStore takes it.
        ownership: this rank's part in the ownership of the job's store; None for a store that ends with this process.
    """

    def __init__(self, quota: Quota = UNLIMITED) -> None:
        self.table = Table(quota)
        self.ownership: Ownership | None = None
        self._waits = KeyWaits()
        self._replies: ReplyCache[str, tuple[int, Future[Any]]] = ReplyCache()  # hash of the command, and its result

    async def execute(self, command: Command[T], idempotency_key: str = "") -> T:
        if not idempotency_key:
            return await self._result(command, self._start(command), "")
        log = None if self.ownership is None else self.ownership.log
        earlier = self._replies.get(idempotency_key)
        if log is not None:
            request_id = _origin(command, idempotency_key)
            if earlier is None:
                earlier = _earlier(command, request_id, log)
            log.request.request_id = request_id
        try:
            future = self._start_once(command, idempotency_key, earlier)
        finally:
            if log is not None:
                log.request.request_id = None
        result = await self._result(command, future, idempotency_key)
        if isinstance(result, bytes) and self._cached(idempotency_key, future):
            self._replies.add(idempotency_key, (hash(command), future), len(result))
        return result

    def _start_once(
        self, command: Command[T], idempotency_key: str, earlier: tuple[int, Future[Any]] | None
    ) -> Future[T]:
        """Start a command, or return the future of the earlier request of the same key."""
        if earlier is not None and earlier[0] != hash(command):
            raise IdempotencyKeyReusedError(
                f"Idempotency-Key {idempotency_key!r} belongs to another request; make a new one for each"
            )
        # A client that repeats its request has given up the earlier one: cancel that, or take over its result.
        future = self._start(command) if earlier is None or earlier[1].cancel() else _completed(earlier[1].result())
        self._replies.add(idempotency_key, (hash(command), future))
        return future

    def cancel_waits(self) -> None:
        self.table.close()

    def fail_waits(self, failure: DistError, *, for_good: bool = False) -> None:
        """See BlockingStore."""
        self._waits.fail(failure, for_good=for_good)

    async def close(self) -> None:
        """Do nothing: a table holds only memory."""

    def _start(self, command: Command[T]) -> Future[T]:
        self.table.count_call(command.name)
        if isinstance(command, Waiting):
            return command.start(self.table)
        assert isinstance(command, Immediate)
        return _completed(command.apply(self.table))

    async def _result(self, command: Command[T], future: Future[T], idempotency_key: str) -> T:
        if future.done() and not future.cancelled():
            return future.result()
        assert isinstance(command, Waiting)
        import asyncio  # the caller has loaded it; a rank without HTTP clients does without, which saves 8 MB

        try:
            with self._waits.of(future, command) as wait:
                await asyncio.wait([asyncio.wrap_future(future)], timeout=max(0.0, command.seconds))
        except BaseException:  # the client has disconnected
            if not future.cancel() and self._discard(idempotency_key, future):
                command.undo(self.table, future.result())
            raise
        if future.cancel():
            raise wait.error(command, self.table)
        return future.result()

    def _discard(self, idempotency_key: str, future: Future[Any]) -> bool:
        """Remove a reply from the cache; return False if a repeated request has taken it over."""
        if not idempotency_key:
            return True
        if not self._cached(idempotency_key, future):
            return False
        self._replies.pop(idempotency_key)
        return True

    def _cached(self, idempotency_key: str, future: Future[Any]) -> bool:
        """Return whether the reply to a request is in the cache, and no repeated request has taken it over."""
        cached = self._replies.get(idempotency_key)
        return cached is not None and cached[1] is future


class BlockingMemoryStore(BlockingStore):
    """Keys and values in this process.

    Args:
        table: the keys and values.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self._waits = KeyWaits()

    def waits_under_way(self) -> bool:
        return bool(self._waits)

    def pending_waits(self) -> list[KeyWaitInfo]:
        return self._waits.pending()

    def fail_waits(self, failure: DistError, *, for_good: bool = False) -> None:
        super().fail_waits(failure, for_good=for_good)
        self._waits.fail(failure, for_good=for_good)

    def execute(self, command: Command[T], timeout: float | None = None) -> T:
        self.table.count_call(command.name)
        found: tuple[T] | None = command.try_execute(self.table)
        if found is not None:
            return found[0]
        return wait_here(command, self.table, self._waits)

    def undo(self, command: QueuePop, value: bytes) -> None:
        command.undo(self.table, value)

    def close(self) -> None:
        """Do nothing: a table holds only memory."""


def wait_here(command: Command[T], table: Table, waits: KeyWaits) -> T:
    """Wait for a command that has to wait, and return its result. Ctrl-C ends the wait, and so does a failure."""
    assert isinstance(command, Waiting)
    future: Future[T] = command.start(table)
    done, deadline = threading.Event(), Deadline(command.seconds)
    future.add_done_callback(lambda _: done.set())  # futures.wait does not return for a cancelled future
    try:
        with waits.of(future, command) as wait:
            while not done.wait(deadline.remaining()) and not deadline.expired():
                pass
    except BaseException:
        if not future.cancel():
            command.undo(table, future.result())
        raise
    if future.cancel():
        raise wait.error(command, table)
    return future.result()


def _origin(command: Command[Any], idempotency_key: str) -> RequestId:
    """Return the identity of a request for the log of changes; the next owner, another process, derives the same."""
    plain = command.with_timeout(0.0) if isinstance(command, Waiting) else command
    digest = hashlib.blake2b(codec.encode_command(plain, 0), digest_size=8).digest()
    return RequestId(_KEY_PREFIX + idempotency_key.encode(), int.from_bytes(digest, "big"))


def _earlier(command: Command[Any], request_id: RequestId, log: ChangeLog) -> tuple[int, Future[Any]] | None:
    """Return the reply to the same request at an earlier owner; None if it changed nothing there."""
    found = log.inherited_reply(request_id.identity)
    if found is None:
        return None
    number, frame = found
    if number != request_id.number:
        return hash(command) + 1, _completed(None)  # another command's
    return hash(command), _completed(codec.decode_result(command, store_frames.decode_response(frame), frame))


def _completed(result: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(result)
    return future
