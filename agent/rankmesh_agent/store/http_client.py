"""Clients of a remote store over HTTP, with and without an event loop."""

from __future__ import annotations

import secrets
from collections.abc import Generator
from http import HTTPStatus
from typing import Any, TypeVar

import httpx

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.httpx_proof import prove
from rankmesh_agent.net.tls import check_scheme, client_context
from rankmesh_agent.store import http_codec
from rankmesh_agent.store.base import (
    CONNECT_SECONDS,
    RESPONSE_SECONDS,
    AsyncStore,
    BlockingStore,
    unresponsive_error,
)
from rankmesh_agent.store.command import Command, Waiting
from rankmesh_agent.store.moved import StoreMovedError
from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.errors import (
    BY_CODE,
    AuthenticationError,
    DistError,
    DistNetworkError,
    DistStoreError,
    InvalidValueError,
    KeyNotFoundError,
    QueueEmptyError,
    RankFailedError,
    StoreTimeoutError,
    StoreUnresponsiveError,
)
from rankmesh_agent.wire.http_auth import NEEDS_TLS, MissingProofError, needs_tls, refusal
from rankmesh_agent.wire.schemas import FORWARDED_HEADER, LONG_POLL_SECONDS, MAX_BODY_BYTES

HTTP_MARGIN_SECONDS = 10.0
"""Least time limit of the response to a command that waits, besides its wait: the owner may have to load its web
framework."""
IDLE_SECONDS = 2.0
"""Lifetime of an unused connection: less than the 5 s after which uvicorn closes its end."""

_CONNECTION_LOST = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)

# A connection for each wait, or waiting calls would keep out the calls that set their keys.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=IDLE_SECONDS)

T = TypeVar("T")

Exchange = Generator[httpx.Request, httpx.Response, T]
"""Yields requests one by one, receives the responses or httpx's errors, and returns a result."""


class HttpStore(AsyncStore):
    """The store at another agent. It serves one event loop, the first that uses it.

    Args:
        url: base URL of the agent that owns the keys and values.
        token: the job's token; empty for none.
        forwarded: whether the requests are other clients', which the agent must not forward to yet another one.

    Attributes:
        url, token: the same.
        timeout: seconds in which the owner must respond to a command that does not wait.
    """

    def __init__(self, url: str, token: str = "", *, forwarded: bool = False) -> None:
        self.url = url.rstrip("/")
        self.token = token
        self.timeout = RESPONSE_SECONDS
        self._forwarded = forwarded
        self._transport: httpx.AsyncHTTPTransport | None = None

    async def execute(self, command: Command[T], idempotency_key: str = "") -> T:
        if self._transport is None:  # made here, because it belongs to the running event loop
            self._transport = httpx.AsyncHTTPTransport(**_options(self.url))
        exchange = _exchange(self.url, self.token, command, idempotency_key, self.timeout, forwarded=self._forwarded)
        try:
            request = next(exchange)
            while True:
                try:
                    response = await self._transport.handle_async_request(request)
                    try:
                        await response.aread()
                    finally:
                        await response.aclose()
                except httpx.HTTPError as error:
                    request = exchange.throw(error)
                else:
                    request = exchange.send(response)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    def cancel_waits(self) -> None:
        """Do nothing: the waits are at the owner."""

    async def close(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.aclose()


class BlockingHttpStore(BlockingStore):
    """A remote store for callers without an event loop that cannot use the binary protocol.

    Args:
        url: base URL of the owner of the keys and values.
        token: the job's token; empty for none.
    """

    def __init__(self, url: str, token: str = "") -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._transport = httpx.HTTPTransport(**_options(self._url))

    def close(self) -> None:
        self._transport.close()

    def execute(self, command: Command[T], timeout: float | None = None) -> T:
        if timeout is None:
            timeout = self.limit(command)
        exchange = _exchange(self._url, self._token, command, "", timeout)
        try:
            request = next(exchange)
            while True:
                try:
                    response = self._transport.handle_request(request)
                    try:
                        response.read()
                    finally:
                        response.close()
                except httpx.HTTPError as error:
                    request = exchange.throw(error)
                else:
                    request = exchange.send(response)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def _options(url: str) -> dict[str, Any]:
    # Loading the certificate authorities takes 20 ms, and plain HTTP does not need them.
    return {"limits": _LIMITS, "trust_env": False, "verify": url.startswith("https:") and client_context()}


def _exchange(
    url: str, token: str, command: Command[T], idempotency_key: str, timeout: float, *, forwarded: bool = False
) -> Exchange[T]:
    """Request a command, which must have responded ``timeout`` seconds after its own time limit."""
    try:
        check_scheme(url.partition("://")[0], url)
    except ValueError as error:
        raise DistNetworkError(str(error), address=url) from None
    headers = {}
    if forwarded:
        headers[FORWARDED_HEADER] = "1"
    if command.writes:
        headers["Idempotency-Key"] = idempotency_key or secrets.token_hex(16)
    try:
        if isinstance(command, Waiting) and command.seconds:
            timeout = max(timeout, HTTP_MARGIN_SECONDS)
            exchange: Exchange[T] = _long_polls(url, token, headers, command, timeout)
        else:
            exchange = _request(url, token, headers, command, timeout)
        return (yield from exchange)
    except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
        raise unresponsive_error(f"the store at {url}", url, command, timeout) from error


def _long_polls(url: str, token: str, headers: dict[str, str], command: Waiting[T], timeout: float) -> Exchange[T]:
    """Request a command that waits, by consecutive long polls."""
    deadline = Deadline(command.seconds)
    while True:
        seconds = min(LONG_POLL_SECONDS, deadline.remaining())
        try:
            part: Command[T] = command.with_timeout(seconds)
            return (yield from _request(url, token, headers, part, deadline.remaining() + timeout))
        except StoreUnresponsiveError:  # the agent at the URL forwards to the owner
            raise
        except (KeyNotFoundError, StoreTimeoutError, QueueEmptyError) as error:
            if error.ranks or deadline.expired():
                raise


def _request(url: str, token: str, headers: dict[str, str], command: Command[T], seconds: float) -> Exchange[T]:
    """Send a request, and send it again if the connection broke: it may have been idle for too long."""
    plain = http_codec.encode_command(command)
    timeout = httpx.Timeout(seconds, connect=min(CONNECT_SECONDS, seconds))
    try:
        request = httpx.Request(
            plain.method,
            url + plain.path,
            params=plain.params or None,
            headers={**plain.headers, **headers},
            json=plain.json,
            content=plain.content,
            extensions={"timeout": timeout.as_dict()},
        )
    except httpx.InvalidURL as error:
        raise _unreachable_error(url, error) from error
    if len(request.content) > MAX_BODY_BYTES:  # the server's refusal would hardly arrive: the connection breaks earlier
        raise InvalidValueError(f"{len(request.content)} bytes in one request, at most {MAX_BODY_BYTES} are allowed")
    try:
        try:
            response = yield from _proven(request, url, token)
        except _CONNECTION_LOST:
            response = yield from _proven(request, url, token)
    except (httpx.ReadTimeout, httpx.WriteTimeout):
        raise
    except httpx.HTTPError as error:
        raise _unreachable_error(url, error) from error
    return _result_of(url, command, response)


def _proven(request: httpx.Request, url: str, token: str) -> Exchange[httpx.Response]:
    """Send a request with a proof of the token, and return the response of an owner that proves it, too.

    Raises:
        AuthenticationError: the owner does not prove that it knows the token.
    """
    if not token:
        return (yield request)
    script = prove(request, token)
    sent = next(script)
    while True:
        response = yield sent
        try:
            sent = script.send((response, response.content))
        except MissingProofError as error:
            if error.retryable:
                raise DistNetworkError(f"the store at {url} answered {error.status}", address=url) from error
            raise AuthenticationError(f"{url} is not the store that it should be: {error}", address=url) from error
        except StopIteration as end:
            return response if end.value else httpx.Response(HTTPStatus.UNAUTHORIZED, content=refusal(token))


def _result_of(url: str, command: Command[T], response: httpx.Response) -> T:
    """Return the result in a response, or raise its error."""
    if not response.is_success:
        error = _error_of(url, response)
        if isinstance(error, DistStoreError):
            return http_codec.decode_error(command, error)
        raise error
    try:
        return http_codec.decode_result(command, response.content)
    except (ValueError, KeyError, TypeError, DistStoreError):
        raise _not_a_store_error(url, response) from None


def _error_of(url: str, response: httpx.Response) -> DistError:
    """Return a store's error as the owner raised it; any other error is a failure of the owner, not of the caller."""
    try:
        found = json_text.loads(response.content)
        code, detail = found["code"], found["detail"]
        kind = BY_CODE.get(code)
    except (ValueError, TypeError, KeyError):
        return _not_a_store_error(url, response)
    if kind is not None and issubclass(kind, DistStoreError | RankFailedError):
        ranks = found.get("ranks")
        return kind(detail, ranks=[rank for rank in ranks if isinstance(rank, int)] if isinstance(ranks, list) else ())
    if code == StoreMovedError.code:
        ranks = found.get("ranks")
        return StoreMovedError(detail, ranks=ranks if isinstance(ranks, list) else ())
    return DistNetworkError(f"the store at {url} answered {response.status_code}: {detail}", address=url)


def _unreachable_error(url: str, error: Exception) -> DistNetworkError:
    reason = str(error) or type(error).__name__
    return DistNetworkError(f"the store at {url} cannot be reached: {reason}", address=url)


def _not_a_store_error(url: str, response: httpx.Response) -> DistNetworkError:
    if needs_tls(response.status_code, response.content):
        return DistNetworkError(f"cannot use {url}: {NEEDS_TLS}", address=url)
    return DistNetworkError(
        f"{url} is not a RankMesh store: it gave an answer ({response.status_code}) that is not RankMesh's. "
        "Is the port another program's?",
        address=url,
    )
