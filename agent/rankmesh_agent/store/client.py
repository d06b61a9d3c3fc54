"""Client of the server of a store."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from rankmesh_agent.net.deadline import Deadline, in_thread
from rankmesh_agent.net.descriptors import is_exhausted
from rankmesh_agent.net.pool import ConnectionPool
from rankmesh_agent.net.stream import StreamClosedError, StreamTimeoutError
from rankmesh_agent.net.tls_socket import RecordChangedError
from rankmesh_agent.store import codec
from rankmesh_agent.store.client_connection import ClientConnection, Connector
from rankmesh_agent.store.command import Command, Waiting
from rankmesh_agent.store.commands import QueuePop
from rankmesh_agent.store.store import Store, response_seconds
from rankmesh_agent.wire import store_frames
from rankmesh_agent.wire.errors import (
    DistError,
    DistNetworkError,
    DistStoreError,
    KeyNotFoundError,
    ProtocolError,
    QueueEmptyError,
    RankFailedError,
    StoreTimeoutError,
    StoreUnresponsiveError,
)
from rankmesh_agent.wire.hello import NAME_BYTES
from rankmesh_agent.wire.store_frames import RequestId

SUBMIT_SECONDS = 20.0
"""Seconds in which the server must respond to a command of ``submit`` that does not wait."""
_THREAD = "rankmesh-store-call"
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
"""Seconds between attempts to reach a server that is away, about an eighth of the time so far."""

T = TypeVar("T")


class Call(Generic[T]):
    """One call of a store, over one connection after the other if they break.

    Args:
        request_id: identity of the first request that may have been executed; None while there is none.

    Attributes:
        began: when it began, by time.monotonic.
        failure: the failure of a rank that has ended its wait, if any.
        cancelled: whether the caller does not wait for the result any more.
        retries: how often it may be repeated at once if its connection breaks.
    """

    __slots__ = ("began", "cancelled", "command", "connection", "failure", "request_id", "retries")

    def __init__(self, command: Command[T], request_id: RequestId | None = None) -> None:
        self.command = command
        self.request_id = request_id
        self.began = time.monotonic()
        self.failure: DistError | None = None
        self.cancelled = False
        self.retries = 1
        self.connection: ClientConnection | None = None

    def interrupt(self) -> None:
        """End the connection, by which the server learns the end of the wait. From any thread."""
        if self.connection is not None:
            self.connection.shutdown()

    def awaited_keys(self) -> Sequence[str]:
        """Return the command's keys."""
        return getattr(self.command, "keys", None) or (getattr(self.command, "key", ""),)

    def remaining(self, timeout: float, slack: float) -> tuple[Command[T], float]:
        """Return the command and its time limit, less the time that has passed since the call began.

        Args:
            timeout: the call's, besides the time that the command waits.
            slack: time that does not shorten the wait.
        """
        command, spent = self.command, time.monotonic() - self.began
        if spent > slack and isinstance(command, Waiting) and command.seconds:
            late = max(0.0, spent - command.seconds)
            return command.with_timeout(max(0.0, command.seconds - spent)), max(0.0, timeout - late)
        return command, max(0.0, timeout - spent)


class PendingCall(Future[T]):
    """A call in a thread of its own, to be awaited or asked for its ``result``. A cancelled wait takes nothing."""

    def __init__(self, client: StoreClient, call: Call[T]) -> None:
        super().__init__()
        self._client, self._call = client, call
        threading.Thread(target=self._run, name=_THREAD, daemon=True).start()

    def cancel(self) -> bool:
        self._call.cancelled = True
        self._call.interrupt()
        return super().cancel()

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    async def _wait(self) -> T:
        import asyncio  # the caller has loaded it; a rank without HTTP clients does without, which saves 8 MB

        try:
            return await asyncio.wrap_future(self)
        except asyncio.CancelledError:
            if not self.cancel() and self.exception() is None:  # the result came a moment before
                self._give_back(self.result())
            raise

    def _run(self) -> None:
        command = self._call.command
        try:
            timeout = min(response_seconds(command), SUBMIT_SECONDS)
            result = self._client.execute(command, timeout, self._call)
        except Exception as error:
            if self.set_running_or_notify_cancel():
                self.set_exception(error)
        else:
            if self.set_running_or_notify_cancel():
                self.set_result(result)
            else:
                self._give_back(result)

    def _give_back(self, result: Any) -> None:
        """Return a value to its queue, as its caller has left; a repeated call finds it under the Idempotency-Key."""
        command, request_id = self._call.command, self._call.request_id
        if isinstance(command, QueuePop) and not (request_id is not None and request_id.keyed):
            in_thread(_THREAD, self._client.undo, command, result)  # which fails if the server is gone


class StoreClient(Store):
    """A remote store.

    Concurrent threads use a connection each, so a waiting call does not delay others. If a connection breaks, its call
    is repeated over another one, and the server executes it once.

    Attributes:
        failure: the first failure of this world that has ended waits, for errors: perhaps the server's host has failed.
    """

    returns = False
    """True if calls wait for a server that is away, because it is started again."""

    def __init__(
        self, url: str, token: str = "", store: bytes = store_frames.NO_STORE_ID, unix_socket: str = ""
    ) -> None:
        self._url = url.rstrip("/")
        self._connector = Connector(self._url, token, store, unix_socket, self._unreachable_error)
        self._pool: ConnectionPool[ClientConnection] = ConnectionPool(self._closed_error)
        self.failure: DistError | None = None
        self._waits: set[Call[Any]] = set()  # those under way; changes atomically
        self._final: DistError | None = None

    def execute_first(self, command: Command[T], deadline: Deadline) -> T:
        """Execute a command that does not wait, at a server that may not have started yet, or has too many clients.

        Raises:
            DistNetworkError: no server serves this client before the deadline, or it is not a store.
        """
        while True:
            try:
                return self.execute(command, max(deadline.remaining(), _SHORTEST_PAUSE))
            except DistNetworkError as error:
                if not isinstance(error.__cause__, OSError | StreamClosedError) or is_exhausted(error.__cause__):
                    raise
                if deadline.expired():
                    raise DistNetworkError(
                        f"waited {deadline.seconds:g} s for a store at {self._url}: {error.__cause__}. Does the "
                        "process that hosts it (is_master=True) run, and are host and port the same there?",
                        address=self._url,
                    ) from error
            time.sleep(min(_pause(deadline.elapsed()), deadline.remaining()))

    def close(self) -> None:
        """Close all connections; calls in progress end with an error."""
        self._pool.close()

    def submit(self, command: Command[T], idempotency_key: str = "") -> PendingCall[T]:
        """Execute a command in a thread of its own.

        Args:
            idempotency_key: a unique name of this call. If a caller does not know whether its command was executed, it
                sends the command again under the same key: the store does not execute it twice but returns the same
                result.

        Raises:
            IdempotencyKeyReusedError: by ``result``, as the errors of ``execute``: the key belongs to another command.
        """
        return PendingCall(self, Call(command, _keyed_id(idempotency_key, command) if idempotency_key else None))

    def execute(self, command: Command[T], timeout: float | None = None, call: Call[T] | None = None) -> T:
        """Execute a command: see the base class."""
        if timeout is None:
            timeout = response_seconds(command)
        call = call or Call(command)
        ends = call.began + timeout + command.seconds
        again = False
        if command.seconds:
            self._waits.add(call)
            call.failure = call.failure or self._final
        try:
            while True:
                acquire = self._pool.connect if again else self._pool.acquire
                try:
                    return self._attempt(acquire(lambda: self._connector.open(ends)), call, timeout, again)
                except StreamTimeoutError as error:
                    raise self._unresponsive_error(command, timeout) from error
                except (StreamClosedError, DistNetworkError) as error:
                    self._check_repeatable(call, error, ends)
                again = True
        finally:
            self._waits.discard(call)

    def _attempt(self, connection: ClientConnection, call: Call[T], timeout: float, again: bool) -> T:
        """Make a call over a connection; ``again`` if it has been made over another one."""
        command = call.command
        call.connection = connection
        if call.cancelled:
            connection.shutdown()
        if call.failure is not None and isinstance(command, Waiting):  # does it have to wait?
            command = command.with_timeout(0.0)
        elif again or not connection.seq:
            # To connect took some of the time: the margin has room for a little of it.
            command, timeout = call.remaining(timeout, 0.0 if again else timeout / 2)
        try:
            result = connection.call(command, timeout, call.request_id)
        except DistStoreError as error:
            call.connection = None
            self._pool.release(connection)
            if isinstance(error, KeyNotFoundError | StoreTimeoutError | QueueEmptyError):
                raise self._wait_error(call, error) from None
            raise
        except BaseException as error:  # Ctrl-C too: by the closed connection the server learns that the wait is over
            unknown = isinstance(error, StreamClosedError | ProtocolError) and command.writes
            if unknown and call.request_id is None:
                call.request_id = RequestId(connection.name, connection.seq)
            self._pool.discard(connection)
            raise
        call.connection = None
        self._pool.release(connection)
        return result

    def _wait_error(self, call: Call[Any], error: DistStoreError) -> DistStoreError | RankFailedError:
        """Return the error of a call that has waited in vain, given the server's."""
        return error if call.failure is None else failed_wait_error(call.failure, error)

    def _check_repeatable(self, call: Call[Any], error: StreamClosedError | DistNetworkError, ends: float) -> None:
        """Return, after a pause if need be, if a call is to be repeated over a new connection; else raise its error."""
        command = call.command
        if isinstance(error.__cause__, RecordChangedError):
            unknown = f"; whether {command.name} was executed is not known" if command.writes else ""
            raise DistNetworkError(
                f"the connection to {self._name()} is closed: {error.__cause__}{unknown}", address=self._url
            ) from None
        lost, pause = self._unreachable_error(error), _pause(time.monotonic() - call.began)
        if isinstance(error, StreamClosedError) and call.retries and not call.cancelled:
            call.retries -= 1  # the server closed it while it was idle, perhaps
            return
        ended = call.cancelled or self._pool.closed or time.monotonic() + pause >= ends
        if lost is error and (ended or not self.returns or error.__cause__ is None):
            raise error
        if ended or not self.returns:
            raise lost from error
        if call.failure is not None:
            raise failed_wait_error(call.failure, lost) from error
        time.sleep(pause)

    def waits_under_way(self) -> bool:
        """Return whether a wait is under way."""
        return bool(self._waits)

    def pending_waits(self) -> set[Call[Any]]:
        """Return the waits under way. From any thread."""
        return self._waits.copy()

    def fail_waits(self, failure: DistError, at: float | None = None, *, for_good: bool = False) -> None:
        """End the waits under way for keys that are not set, with RankFailedError. From any thread; does not block.

        The connections of the waits end, by which the server learns that they are over.

        Args:
            failure: the reason; a rank that has failed, say.
            at: when it came, by the monotonic clock: waits that began later go on. Now if left out.
            for_good: whether later waits end at once, too.
        """
        at = time.monotonic() if at is None else at
        self.failure = self.failure or failure
        if for_good and self._final is None:
            self._final = failure
        for call in self._waits.copy():
            if call.failure is None and (call.began <= at or for_good):  # with a failure, it does not wait any more
                call.failure, call.retries = failure, 1
                call.interrupt()

    def _unresponsive_error(self, command: Command[T], timeout: float) -> StoreUnresponsiveError:
        limit = f"{round(command.seconds, 1):g} s and " if command.seconds else ""
        limit += f"{round(timeout, 1):g} s{' more' if limit else ''}"
        return StoreUnresponsiveError(
            f"{self._name()} cannot be reached: timed out: its server did not respond to {command.name} within "
            f"{limit}. Is that process stopped, or does a call there hold the interpreter's lock? A longer timeout "
            "waits for it",
            address=self._url,
        )

    def _closed_error(self) -> DistNetworkError:
        return DistNetworkError(f"the connection to the store at {self._url} is closed", address=self._url)

    def _unreachable_error(self, error: Exception) -> DistNetworkError:
        if isinstance(error, DistNetworkError) and not isinstance(error, ProtocolError):
            return error
        reason = str(error) or type(error).__name__
        failure = "" if self.failure is None else f"; {self.failure.message}"
        return DistNetworkError(f"{self._name()} cannot be reached: {reason}{failure}", address=self._url)

    def _name(self) -> str:
        """Return the store for error messages."""
        return f"the store at {self._url}"


def failed_wait_error(failure: DistError, missing: DistError) -> RankFailedError | StoreTimeoutError:
    """Return the error of a wait that ends because of a failure.

    Args:
        failure: of a rank; or StoreTimeoutError, if no rank is left that could set a key.
        missing: what the wait would raise now if its time were over.
    """
    kind = StoreTimeoutError if isinstance(failure, StoreTimeoutError) else RankFailedError
    return kind(
        f"{failure.message}: this ends a wait in the job's store; {missing.message}",
        ranks=failure.ranks,
        group=failure.group,
    )


def _keyed_id(idempotency_key: str, command: Command[Any]) -> RequestId:
    """Return the identity of a request with an Idempotency-Key."""
    plain = command.with_timeout(0.0) if isinstance(command, Waiting) else command
    digest = hashlib.blake2b(codec.encode_command(plain, 0), digest_size=4).digest()
    name = hashlib.blake2b(idempotency_key.encode(), digest_size=NAME_BYTES, person=b"Idempotency-Key").digest()
    return RequestId(name, int.from_bytes(digest, "big"), keyed=True)


def _pause(elapsed: float) -> float:
    """Return the seconds until the next attempt. Many may wait: with jitter, they do not come at the same time."""
    return min(max(_SHORTEST_PAUSE, elapsed / 8), _LONGEST_PAUSE) * random.uniform(0.5, 1.5)
