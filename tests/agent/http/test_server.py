"""An application served from a thread: at once, or when the first client has come."""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.request
from typing import Any

from rankmesh_agent.http import uvicorn_server
from rankmesh_agent.http.server import HttpThread
from rankmesh_agent.net.sockets import bind, url_of


async def hello(scope: dict[str, Any], receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        for step in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{step}.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


class Served:
    """An HttpThread on a free port that notes when its application is made."""

    def __init__(self, *, when_asked: bool) -> None:
        self.listener = bind("127.0.0.1", 0, purpose="the test serves HTTP")
        self.url = url_of(self.listener)
        self.made = threading.Event()
        self.thread = HttpThread(self.make, self.listener, "served", when_asked=when_asked)
        self.thread.start()

    def make(self) -> Any:
        self.made.set()
        return hello

    def ask(self) -> bytes:
        with urllib.request.urlopen(self.url, timeout=20) as answer:
            return bytes(answer.read())


def is_served(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())


def test_at_once():
    served = Served(when_asked=False)
    assert served.made.wait(20)
    assert served.ask() == b"hello"
    served.thread.stop()
    assert not is_served("served")


def test_it_ends_when_told_and_not_at_its_next_look(monkeypatch):

    monkeypatch.setattr(uvicorn_server, "_TICK_SECONDS", 60.0)
    served = Served(when_asked=False)
    assert served.ask() == b"hello"
    served.thread.stop(timeout=20.0)
    assert not is_served("served")


def test_when_asked_and_not_before():
    served = Served(when_asked=True)
    assert not served.made.wait(0.2)
    assert [served.ask(), served.ask()] == [b"hello", b"hello"]
    assert served.made.is_set()
    served.thread.stop()
    assert not is_served("served")


def test_who_comes_while_it_is_made_is_answered():
    served = Served(when_asked=True)
    answers = []
    asking = [threading.Thread(target=lambda: answers.append(served.ask())) for _ in range(4)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(20)
    assert answers == [b"hello"] * 4
    served.thread.stop()


def test_never_asked_it_ends_without_the_application():
    served = Served(when_asked=True)
    served.thread.stop()
    served.thread.stop()
    assert not served.made.is_set()
    assert not is_served("served")
    assert served.listener.fileno() == -1


def test_one_that_cannot_be_made_sends_its_clients_away(monkeypatch):
    told = []
    monkeypatch.setattr(threading, "excepthook", lambda failure: told.append(failure.exc_value))
    listener = bind("127.0.0.1", 0, purpose="the test serves HTTP")

    def make() -> Any:
        raise ImportError("no framework")

    thread = HttpThread(make, listener, "served", when_asked=True)
    thread.start()
    # The listener may close before the client has seen that it is connected: then it is the connect that is reset.
    with (
        contextlib.suppress(ConnectionResetError),
        socket.create_connection(listener.getsockname(), timeout=20) as client,
    ):
        assert client.recv(1) == b""
    thread.stop()
    assert [str(error) for error in told] == ["no framework"]
