"""The store at another place: whoever has the keys and values is asked over HTTP, with an event loop or without."""

from __future__ import annotations

import secrets
from collections.abc import Generator
from typing import Any, TypeVar

import httpx

from rankmesh_agent.http.middleware import MAX_BODY_BYTES
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.store.base import CONNECT_SECONDS, RESPONSE_SECONDS, AsyncStore
from rankmesh_agent.store.blocking import BlockingStore
from rankmesh_agent.store.command import Command, Waiting
from rankmesh_agent.wire.errors import (
    BY_CODE,
    DistError,
    DistNetworkError,
    DistStoreError,
    InvalidValueError,
    KeyNotFoundError,
    QueueEmptyError,
    StoreTimeoutError,
)
from rankmesh_agent.wire.schemas import LONG_POLL_SECONDS

IDLE_SECONDS = 2.0
"""How long an unused connection is kept: less than the 5 s after which uvicorn closes its end."""

_CONNECTION_LOST = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)

# As many connections as there are waits, or those who wait would keep out those who set.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=IDLE_SECONDS)

T = TypeVar("T")

Exchange = Generator[httpx.Request, httpx.Response, T]
"""Yields one request after the other, is sent the answers or httpx's errors, and returns a result."""


class HttpStore(AsyncStore):
    """The store at another agent. It serves one event loop, the first that uses it.

    Args:
        url: base URL of the agent that owns the keys and values.
        token: the job's token; empty for none.

    Attributes:
        url, token: the same.
    """

    def __init__(self, url: str, token: str = "") -> None:
        self.url = url.rstrip("/")
        self.token = token
        self._transport: httpx.AsyncHTTPTransport | None = None

    async def execute(self, command: Command[T], once: str = "") -> T:
        if self._transport is None:  # made here, because it belongs to the event loop that runs now
            self._transport = httpx.AsyncHTTPTransport(**_options(self.url))
        exchange = _exchange(self.url, self.token, command, once, RESPONSE_SECONDS)
        try:
            request = next(exchange)
            while True:
                try:
                    answer = await self._transport.handle_async_request(request)
                    try:
                        await answer.aread()
                    finally:
                        await answer.aclose()
                except httpx.HTTPError as error:
                    request = exchange.throw(error)
                else:
                    request = exchange.send(answer)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    def cancel_waits(self) -> None:
        """Nobody waits for keys of this process."""

    async def close(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.aclose()


class BlockingHttpStore(BlockingStore):
    """The store at another place, for callers without an event loop that cannot reach it over the fast path.

    Args:
        url: base URL of whoever owns the keys and values.
        token: the job's token; empty for none.
    """

    def __init__(self, url: str, token: str = "") -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._transport = httpx.HTTPTransport(**_options(self._url))

    def execute(self, command: Command[T]) -> T:
        return self.execute_within(command, RESPONSE_SECONDS)

    def close(self) -> None:
        self._transport.close()

    def execute_within(self, command: Command[T], timeout: float) -> T:
        """Carry out a command, for which the owner may take ``timeout`` seconds besides the time it waits."""
        exchange = _exchange(self._url, self._token, command, "", timeout)
        try:
            request = next(exchange)
            while True:
                try:
                    answer = self._transport.handle_request(request)
                    try:
                        answer.read()
                    finally:
                        answer.close()
                except httpx.HTTPError as error:
                    request = exchange.throw(error)
                else:
                    request = exchange.send(answer)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def _options(url: str) -> dict[str, Any]:
    # Loading the authorities takes 20 ms, for which plain HTTP has no use.
    return {"limits": _LIMITS, "trust_env": False, "verify": url.startswith("https:")}


def _exchange(url: str, token: str, command: Command[T], once: str, timeout: float) -> Exchange[T]:
    """Ask for a command, one long poll after the other if it is one that waits."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    if command.writes:
        headers["Idempotency-Key"] = once or secrets.token_hex(16)
    if not isinstance(command, Waiting):
        return (yield from _request(url, headers, command, timeout))
    deadline = Deadline(command.seconds)
    while True:
        seconds = min(LONG_POLL_SECONDS, deadline.remaining())
        try:
            part: Command[T] = command.with_timeout(seconds)
            return (yield from _request(url, headers, part, seconds + timeout))
        except (KeyNotFoundError, StoreTimeoutError, QueueEmptyError):
            if deadline.expired():
                raise


def _request(url: str, headers: dict[str, str], command: Command[T], seconds: float) -> Exchange[T]:
    """Ask for a command once, and again if the connection broke: it may have been idle for too long."""
    asked = command.request()
    timeout = httpx.Timeout(seconds, connect=min(CONNECT_SECONDS, seconds))
    try:
        request = httpx.Request(
            asked.method,
            url + asked.path,
            params=asked.params or None,
            headers={**asked.headers, **headers},
            json=asked.json,
            content=asked.content,
            extensions={"timeout": timeout.as_dict()},
        )
    except httpx.InvalidURL as error:
        raise _unreachable_error(url, error) from error
    if len(request.content) > MAX_BODY_BYTES:  # its refusal would hardly arrive: the connection breaks while we send
        raise InvalidValueError(f"{len(request.content)} bytes in one request, at most {MAX_BODY_BYTES} are allowed")
    try:
        answer = yield request
    except _CONNECTION_LOST:
        try:
            answer = yield request
        except httpx.HTTPError as error:
            raise _unreachable_error(url, error) from error
    except httpx.HTTPError as error:
        raise _unreachable_error(url, error) from error
    return _result_of(url, command, answer)


def _result_of(url: str, command: Command[T], answer: httpx.Response) -> T:
    """Return the result that an answer stands for, or raise its error."""
    if not answer.is_success:
        refusal = _error_of(url, answer)
        if isinstance(refusal, DistStoreError):
            return command.refused(refusal)
        raise refusal
    try:
        return command.result(answer.content)
    except (ValueError, KeyError, TypeError, DistStoreError):
        raise _not_a_store_error(url, answer) from None


def _error_of(url: str, answer: httpx.Response) -> DistError:
    """Return a store's error as the owner raised it; anything else is the owner's failure, not our caller's."""
    try:
        found = answer.json()
        code, detail = found["code"], found["detail"]
        kind = BY_CODE.get(code)
    except (ValueError, TypeError, KeyError):
        return _not_a_store_error(url, answer)
    if kind is not None and issubclass(kind, DistStoreError):
        return kind(detail)
    return DistNetworkError(f"the store at {url} answered {answer.status_code}: {detail}", address=url)


def _unreachable_error(url: str, error: Exception) -> DistNetworkError:
    what = str(error) or type(error).__name__
    return DistNetworkError(f"the store at {url} cannot be reached: {what}", address=url)


def _not_a_store_error(url: str, answer: httpx.Response) -> DistNetworkError:
    return DistNetworkError(
        f"{url} is not a RankMesh store: it gave an answer ({answer.status_code}) that is not RankMesh's. "
        "Is the port another program's?",
        address=url,
    )
