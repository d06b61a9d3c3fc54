"""ASGI application that answers all well-formed requests itself, and loads the web framework at the first other one.

Importing the framework takes longer than the rest of a rank's start together, every rank waits for its gateway, and it
takes 23 MB. It has the OpenAPI document, and describes what is wrong with a query, or a body that is not JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from inspect import isawaitable

from rankmesh_agent.http.middleware import PROBLEM_TYPE, Application, Message, Receive, Send, bug, problem_of
from rankmesh_agent.net.descriptors import log_failure
from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.errors import DistError
from rankmesh_agent.wire.json_text import InvalidBodyError
from rankmesh_agent.wire.schemas import JoinReply, JoinRequest, Problem
from rankmesh_gateway.http import handlers
from rankmesh_gateway.http.endpoints import Endpoint, check_body, endpoint_of, reply_of
from rankmesh_gateway.http.replies import Reply, Request, SharedReplies
from rankmesh_gateway.state.registry import SCAN_SECONDS, complete_joins
from rankmesh_gateway.state.validation import InvalidRequestError, closing_error

_DELIVERED_JOINS = 64
_POLL_SECONDS = 0.05
"""Interval at which a request that waits for the framework checks whether the gateway ends."""


class GatewayApplication:
    """ASGI application; ``make_framework_app``, called in a thread, returns the framework's, with all endpoints."""

    def __init__(self, services: handlers.Services, make_framework_app: Callable[[], Application]) -> None:
        self._services = services
        self._registry = services.registry
        self._make_framework_app = make_framework_app
        self._replies = SharedReplies()
        self._framework_app: asyncio.Future[Application] | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request, or forward it to the framework's application."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        method, path = scope.get("method", ""), scope["path"]
        endpoint = endpoint_of(method, path) if method != "HEAD" else None
        if endpoint is None or endpoint.handler is None:
            await self._forward(scope, receive, send)
            return
        content = await _receive_body(receive) if method == "POST" else b""
        if content is None:
            return
        headers = dict(scope["headers"])
        request = Request(scope, receive)
        try:
            request.job = check_body(scope, content)
            query, body = _parse(endpoint, scope, headers, content)
            reply = endpoint.respond(self._services, query, body, request)
            if isawaitable(reply):
                reply = await reply
        except _FrameworkNeededError:
            await self._forward(scope, _replay(content, receive) if method == "POST" else receive, send)
            return
        except DistError as error:
            reply = _rejection(error)
        except Exception as error:
            await _problem(bug("gateway", method, path, error)).send(receive, send)
            raise  # for the server to log
        if isinstance(reply, JoinReply) and reply.members and isinstance(body, JoinRequest):
            gzip = b"gzip" in headers.get(b"accept-encoding", b"")
            await self._replies.encoded(reply).send(send, body.member, gzip)
        else:
            await reply_of(endpoint, reply, request).send(receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        """Scan the registry for silent ranks while the server runs."""
        await receive()
        self._registry.deliver = partial(_deliver, asyncio.get_running_loop())
        self._registry.expect_scans(True)
        scan = asyncio.ensure_future(self._scan())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        scan.cancel()
        self._registry.deliver = complete_joins
        self._registry.expect_scans(False)
        await send({"type": "lifespan.shutdown.complete"})

    async def _scan(self) -> None:
        while True:
            await asyncio.sleep(SCAN_SECONDS)
            try:
                self._registry.poll_timeouts()
                await asyncio.to_thread(self._services.stores.drop_unused)  # it may wait for a disk, or for etcd
            except Exception as error:
                log_failure("the scan for silent ranks failed, and goes on", error)

    async def _forward(self, scope: Message, receive: Receive, send: Send) -> None:
        """Have the framework's application answer; frequent requests are answered while it is created."""
        if self._framework_app is None:
            self._framework_app = asyncio.ensure_future(asyncio.to_thread(self._make_framework_app))
        while not self._framework_app.done():
            if self._registry.closed:
                await _rejection(closing_error()).send(receive, send)
                return
            await asyncio.wait({self._framework_app}, timeout=_POLL_SECONDS)
        await self._framework_app.result()(scope, receive, send)


def _deliver(loop: asyncio.AbstractEventLoop, joins: Sequence[Future[JoinReply]], reply: JoinReply) -> None:
    """Complete the joins of a world, some in each pass of the event loop, so that other requests have their turn."""
    complete_joins(joins[:_DELIVERED_JOINS], reply)
    if len(joins) > _DELIVERED_JOINS:
        loop.call_soon_threadsafe(_deliver, loop, joins[_DELIVERED_JOINS:], reply)


class _FrameworkNeededError(Exception):
    """The request is not to the letter."""


def _parse(endpoint: Endpoint, scope: Message, headers: Mapping[bytes, bytes], content: bytes) -> tuple[object, object]:
    """Return the parameters and the body of a request."""
    query = body = None
    try:
        if endpoint.query is not None:
            match = endpoint.pattern.fullmatch(scope["path"])
            query = json_text.read_query(endpoint.query, scope["query_string"], match.groupdict() if match else {})
        if endpoint.body is not None and (content or not endpoint.body_optional):
            if headers.get(b"content-type") != b"application/json":
                raise _FrameworkNeededError
            body = json_text.read(endpoint.hints["body"], content)
    except InvalidBodyError as error:
        raise InvalidRequestError(str(error)) from None
    except ValueError:
        raise _FrameworkNeededError from None
    return query, body


async def _receive_body(receive: Receive) -> bytes | None:
    """Return the request's body, None if the client has disconnected."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that gives a body that has been received once more, and then the messages behind it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again


def _rejection(error: DistError) -> Reply:
    return _problem(problem_of(error), handlers.problem_headers(error))


def _problem(problem: Problem, headers: Mapping[str, str] = {}) -> Reply:
    return Reply(json_text.encode(problem.body()), {"content-type": PROBLEM_TYPE, **headers}, problem.status)
