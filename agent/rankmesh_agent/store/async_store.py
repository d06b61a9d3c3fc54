"""A store for callers with an event loop: each call is made in a thread by a client of the store's server."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from rankmesh_agent.store import codec
from rankmesh_agent.store.base import MARGIN_SECONDS
from rankmesh_agent.store.client import Call, StoreClient
from rankmesh_agent.store.command import Command, Waiting
from rankmesh_agent.store.commands import QueuePop
from rankmesh_agent.wire.errors import DistError
from rankmesh_agent.wire.store_frames import REQUEST_ID

RESPONSE_SECONDS = 20.0
"""Seconds in which the server must respond to a command that does not wait."""
_NAME_BYTES, _NUMBER_BYTES = 64, 4

T = TypeVar("T")


class AsyncStore:
    """Keys (text) with values (bytes), and queues of values. For several event loops.

    Args:
        connect: returns a client of the server; called at the first call.
    """

    def __init__(self, connect: Callable[[], StoreClient]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._client: StoreClient | None = None

    async def execute(self, command: Command[T], idempotency_key: str = "") -> T:
        """Execute a command, wait if it has to wait, and return its result. A wait that is cancelled takes nothing.

        Args:
            command: the command; its class documents the result and the errors.
            idempotency_key: a unique name of this call. If a caller does not know whether its command was executed, it
                sends the command again under the same key: the store does not execute it twice but returns the same
                result.

        Raises:
            DistStoreError: the command failed and changed nothing.
            IdempotencyKeyReusedError: the key belongs to another command.
            DistNetworkError: the server is gone, or does not respond (StoreUnresponsiveError).
        """
        import asyncio  # the caller has loaded it; a rank without HTTP clients does without, which saves 8 MB

        client, loop = self._started(), asyncio.get_running_loop()
        call = Call(client.failures_before(), _identity(idempotency_key, command), keyed=bool(idempotency_key))
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            finish: Callable[[], object]
            give_back: Callable[[], object] = bool
            try:
                timeout = MARGIN_SECONDS if command.seconds else RESPONSE_SECONDS
                result = client.execute(command, timeout, call)
                finish = partial(future.set_result, result)
                give_back = partial(_give_back, client, command, call, result)
            except Exception as error:
                finish = partial(future.set_exception, error)
            try:
                loop.call_soon_threadsafe(lambda: give_back() if future.done() else finish())
            except RuntimeError:  # the loop has ended
                give_back()

        _start(run)
        try:
            return await future
        except asyncio.CancelledError:
            call.cancel()
            if future.done() and not future.cancelled() and future.exception() is None:
                _give_back(client, command, call, future.result())  # it came a moment before
            raise

    def close(self) -> None:
        """Close the connections; calls in progress end with an error."""
        with self._lock:
            if self._client is not None:
                self._client.close()

    def _started(self) -> StoreClient:
        with self._lock:
            if self._client is None:
                self._client = self._connect()
            return self._client


def _start(run: Callable[[], object]) -> None:
    threading.Thread(target=run, name="rankmesh-store-call", daemon=True).start()


def _give_back(client: StoreClient, command: Command[Any], call: Call, result: Any) -> None:
    """Return a value to its queue, as its caller has left; a repeated call finds it under the Idempotency-Key."""
    if isinstance(command, QueuePop) and not call.keyed:

        def put_back() -> None:
            with contextlib.suppress(DistError):  # the server is gone
                client.undo(command, result)

        _start(put_back)


def _identity(idempotency_key: str, command: Command[Any]) -> bytes:
    """Return the identity of a request with an Idempotency-Key; empty without one."""
    if not idempotency_key:
        return b""
    plain = command.with_timeout(0.0) if isinstance(command, Waiting) else command
    digest = hashlib.blake2b(codec.encode_command(plain, 0), digest_size=_NUMBER_BYTES).digest()
    name = hashlib.blake2b(idempotency_key.encode(), digest_size=_NAME_BYTES, person=b"Idempotency-Key").digest()
    return REQUEST_ID.pack(name, int.from_bytes(digest, "big"))
