"""A clock that tests turn by hand, requests with defaults, and a gateway that serves HTTP."""

from __future__ import annotations

import functools
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from support.agent_doubles import Agents
from support.gateway_requests import Clock, Requests

from rankmesh_agent.http.server import HttpServer
from rankmesh_agent.net.sockets import bind, url_of
from rankmesh_gateway.clients import agent_client
from rankmesh_gateway.http import app as app_module
from rankmesh_gateway.http.handlers import Services
from rankmesh_gateway.state.registry import Registry

create_framework_app: Callable[..., Any] = app_module.create_framework_app


@functools.cache
def framework_app(_number: int) -> Any:
    """Return an application whose routes, which FastAPI creates at the first request, all tests share."""
    return create_framework_app(app_module.create_services(Registry()))


@pytest.fixture(autouse=True)
def make_framework_app(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Creates the framework's application of services; two that serve at a time have different numbers."""

    def create(services: Services, number: int = 0) -> Any:
        app = framework_app(number)
        app.state.services = services
        return app

    monkeypatch.setattr(app_module, "create_framework_app", create)
    return create


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(clock: Clock) -> Registry:
    return Registry(clock)


@pytest.fixture
def ask() -> Requests:
    return Requests()


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30.0
        while not condition():
            assert time.monotonic() < deadline, "did not happen within 30 s"
            time.sleep(0.005)

    return wait


class Served:
    """ASGI application of the server that the tests share: that of the registry of the test that runs."""

    def __init__(self) -> None:
        self.app: Any = app_module.create_app(Registry())

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)


@pytest.fixture(scope="session")
def server() -> Iterator[tuple[str, Served]]:
    """The URL of a server, and its application."""
    listener = bind("127.0.0.1", 0, purpose="a test listens")
    address, served = url_of(listener), Served()
    server = HttpServer(listener, "gateway")
    server.start(lambda: served)
    yield address, served
    server.close()


@pytest.fixture(autouse=True)
def time_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents have the time of the whole request to accept a connection: here they and their client share a process."""
    monkeypatch.setattr(agent_client, "CONNECT_SECONDS", 30.0)


@pytest.fixture
def agents() -> Iterator[Agents]:
    """The agents of several ranks, which do as a test says."""
    made = Agents()
    listener = bind("127.0.0.1", 0, purpose="the test's agents serve")
    made.base = url_of(listener)
    server = HttpServer(listener, "agents")
    server.start(lambda: made)
    yield made
    server.close()


@pytest.fixture
def url(server: tuple[str, Served], registry: Registry) -> Iterator[str]:
    """The URL of a gateway that serves ``registry``."""
    address, served = server
    served.app = app_module.create_app(registry)
    yield address
    registry.close()


@pytest.fixture
async def client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the gateway that serves ``registry``."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture
async def direct(registry: Registry) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application of ``registry``, without a server; the token is ``secret``."""
    app = app_module.create_app(registry, token="secret", names=["gateway"])
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    headers = {"Authorization": "Bearer secret"}
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8700", headers=headers) as client:
        yield client


@pytest.fixture
def raw_post(url: str) -> Callable[[str, Any], socket.socket]:
    """Posts a request's body over a connection of its own, which is not read."""

    def post(path: str, request: Any) -> socket.socket:
        body = json.dumps(asdict(request))
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection = socket.create_connection((urlsplit(url).hostname, urlsplit(url).port))
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        return connection

    return post
