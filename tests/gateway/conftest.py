"""A clock that tests turn by hand, requests with defaults, and a gateway that serves HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from support.gateway_requests import Clock, Requests

from rankmesh_agent.net.sockets import bind, url_of
from rankmesh_gateway.http.app import create_app
from rankmesh_gateway.http.server import GatewayServer
from rankmesh_gateway.state.registry import Registry


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


@pytest.fixture
def url(registry: Registry) -> Iterator[str]:
    """The URL of a gateway that serves ``registry``."""
    listener = bind("127.0.0.1", 0, purpose="a test listens")
    address = url_of(listener)
    server = GatewayServer(create_app(registry), registry)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    yield address
    server.should_exit = True
    thread.join(10.0)
    assert not thread.is_alive()
