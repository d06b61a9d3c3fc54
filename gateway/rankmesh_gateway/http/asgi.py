"""What ranks ask all the time, answered without the web framework; whatever else is asked goes on to it.

Loading the framework takes longer than the rest of a rank's start together, and all ranks wait for their gateway. So it
is loaded when the first request comes that is not a well-formed join, heartbeat or goodbye of a rank or an agent, asks
for no lease and not for health: from a person, mostly, or from somebody who has something wrong and is to be told what.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

from rankmesh_agent.http.middleware import PROBLEM_TYPE, Application, Message, Receive, Send, bug
from rankmesh_agent.wire.errors import DistError
from rankmesh_agent.wire.schemas import AgentHeartbeat, AgentLeave, Done, Heartbeat, JoinRequest, LeaseRequest, Leave
from rankmesh_gateway.http import handlers
from rankmesh_gateway.http.json_body import read
from rankmesh_gateway.state.registry import Registry
from rankmesh_gateway.state.validation import InvalidRequestError, closing

_LOOK_SECONDS = 0.05
"""How often to look whether the gateway ends while the web application is made."""

Answer = Callable[[Any, Receive], Awaitable[object]]


class Front:
    """ASGI application.

    Args:
        registry: what it serves.
        make_web: returns the web application that has all endpoints, these included; called in a thread.
    """

    def __init__(self, registry: Registry, make_web: Callable[[], Application]) -> None:
        self._registry = registry
        self._make_web = make_web
        self._web: asyncio.Future[Application] | None = None
        self._answers: dict[tuple[str, str], tuple[type[Any] | None, Answer]] = {
            ("POST", "/v1/join"): (JoinRequest, self._join),
            ("POST", "/v1/heartbeat"): (Heartbeat, self._heartbeat),
            ("POST", "/v1/leave"): (Leave, self._leave),
            ("POST", "/v1/agents"): (AgentHeartbeat, self._agent),
            ("POST", "/v1/agents/leave"): (AgentLeave, self._agent_leave),
            ("POST", "/v1/leases"): (LeaseRequest, self._lease),
            ("GET", "/health"): (None, self._health),
        }

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        kind, answer = self._answers.get((scope.get("method", ""), scope["path"]), (None, None))
        if answer is None:
            await self._pass_on(scope, receive, send)
            return
        body = b"" if kind is None else await _body(receive)
        if body is None:
            return
        try:
            asked = None if kind is None else read(kind, _json(scope, body))
        except (ValueError, TypeError, RecursionError):
            await self._pass_on(scope, _again(body, receive), send)
            return
        try:
            said = await answer(asked, receive)
        except (DistError, InvalidRequestError) as error:
            await _refuse(send, error)
        except Exception as error:
            problem = bug("gateway", scope["method"], scope["path"], error)
            await _send(send, problem.status, problem.body(), {"content-type": PROBLEM_TYPE})
            raise  # for the server to log
        else:
            await _send(send, HTTPStatus.OK, said, {"content-type": "application/json"})

    async def _join(self, asked: JoinRequest, receive: Receive) -> object:
        return await handlers.join(self._registry, asked, receive)

    async def _heartbeat(self, asked: Heartbeat, _: Receive) -> object:
        return self._registry.heartbeat(asked)

    async def _leave(self, asked: Leave, _: Receive) -> object:
        self._registry.leave(asked)
        return Done()

    async def _agent(self, asked: AgentHeartbeat, _: Receive) -> object:
        self._registry.agents.beat(asked)
        return Done()

    async def _agent_leave(self, asked: AgentLeave, _: Receive) -> object:
        self._registry.agents.leave(asked)
        return Done()

    async def _lease(self, asked: LeaseRequest, receive: Receive) -> object:
        return await handlers.lease(self._registry, asked, receive)

    async def _health(self, _: None, __: Receive) -> object:
        return handlers.health(self._registry)

    async def _pass_on(self, scope: Message, receive: Receive, send: Send) -> None:
        """Have the web application answer; others are answered while it is made, and the gateway may end meanwhile."""
        if self._web is None:
            self._web = asyncio.ensure_future(asyncio.to_thread(self._make_web))
        while not self._web.done():
            if self._registry.closed:
                await _refuse(send, closing())
                return
            await asyncio.wait({self._web}, timeout=_LOOK_SECONDS)
        await self._web.result()(scope, receive, send)


async def _refuse(send: Send, error: DistError | InvalidRequestError) -> None:
    problem, headers = handlers.refusal(error)
    await _send(send, problem.status, problem.body(), {"content-type": PROBLEM_TYPE, **headers})


async def _live(receive: Receive, send: Send) -> None:
    for step in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{step}.complete"})


async def _body(receive: Receive) -> bytes | None:
    """Return the request's body, None if the client has gone."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(body)


def _json(scope: Message, body: bytes) -> bytes:
    """Return the body if it is said to be JSON.

    Raises:
        TypeError: it is not.
    """
    if dict(scope["headers"]).get(b"content-type") != b"application/json":
        raise TypeError("the body is said to be something else")
    return body


def _again(body: bytes, receive: Receive) -> Receive:
    """Return what receives a body that has been received, and then what comes behind it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again


async def _send(send: Send, status: int, document: object, headers: Mapping[str, str]) -> None:
    body = json.dumps(document, default=vars).encode()  # a dataclass is its variables
    fields = {**headers, "content-length": str(len(body))}
    encoded = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": int(status), "headers": encoded})
    await send({"type": "http.response.body", "body": body})
