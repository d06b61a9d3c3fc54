"""A gateway that shows what a test wants: the real page and guard, with made-up overviews and events."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from rankmesh_agent.http.middleware import Policy, SecurityMiddleware
from rankmesh_agent.net.sockets import bind, url_of
from rankmesh_agent.wire.credentials import Credentials
from rankmesh_gateway import dashboard as files
from rankmesh_gateway.http.dashboard_sessions import DashboardSessions
from rankmesh_gateway.http.endpoints import ENDPOINTS, role_of
from rankmesh_gateway.http.handled import add_handled_routes

NOTHING: dict[str, Any] = {
    "ranks": [],
    "agents": [],
    "groups": [],
    "inflight": [],
    "rates": {"operations": 0.0, "bytes": 0.0},
    "store": [],
}
"""The overview of a gateway that nobody has come to."""
_TICK = 0.05
_OVERVIEW_SECONDS = 1.0


class Double:
    """A gateway on loopback, in a thread.

    Args:
        token: what it asks for; empty for none.

    Attributes:
        overview: what is shown; tests set it.
        snapshots: what the agent of each rank describes; tests set it.
        timelines: those of the jobs; tests set them.
        rates: the samples of the time before; tests set it.
        asked: the Last-Event-ID, or else ``after``, with which each stream was begun.
        first: one less than the number of its first event; as a gateway's, larger than those of gateways before it.
        silent: whether its streams say nothing at the moment, as if the network were gone.
    """

    def __init__(self, token: str = "") -> None:
        self.token = token
        self.overview: dict[str, Any] = {}
        self.snapshots: dict[int, dict[str, Any]] = {}
        self.rates: list[dict[str, float]] = []
        self.timelines: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.silent = False
        self._drops = 0
        self._events: list[tuple[int, str, dict[str, Any]]] = []
        self._port = 0
        self.start()

    def log(self, event: str, **data: Any) -> None:
        """Add an event to the log."""
        self._events.append(
            (self.first + len(self._events) + 1, event, {"time": time.time(), "job": "job", "ranks": [], **data})
        )

    def drop(self) -> None:
        """End the streams of the moment."""
        self._drops += 1

    def start(self) -> None:
        """Serve; from the second time on at the same port, as another gateway that remembers nothing."""
        self._events.clear()
        self.first = time.time_ns() // 1000
        self._id = f"gateway-{time.monotonic_ns()}"
        self._began = time.monotonic()
        listener = bind("127.0.0.1", self._port, purpose="a test listens")
        self.url = url_of(listener)
        self._port = listener.getsockname()[1]
        sessions = DashboardSessions(Credentials(self.token))
        policy = Policy(open_paths=files.paths(), role_of=role_of, translate=sessions.translate)
        app = SecurityMiddleware(self._app(sessions), self.token, policy=policy)
        config = uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listener],))
        self._thread.start()

    def stop(self) -> None:
        """End, and all connections with it."""
        self._server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()

    def __enter__(self) -> Double:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self.stop()

    def _app(self, sessions: DashboardSessions) -> FastAPI:
        app = FastAPI()
        app.state.services = SimpleNamespace(sessions=sessions)
        add_handled_routes(app, [each for each in ENDPOINTS if each.tag == "dashboard"])

        @app.get("/v1/overview")
        async def overview() -> dict[str, Any]:
            return self._body()

        @app.get("/v1/rates")
        async def rates() -> list[dict[str, float]]:
            return self.rates

        @app.get("/v1/timelines")
        async def timelines() -> list[dict[str, Any]]:
            return self.timelines

        @app.get("/v1/ranks/{rank}/snapshot")
        async def snapshot(rank: int) -> dict[str, Any]:
            return self.snapshots[rank]

        @app.get("/v1/events")
        async def events(request: Request, after: str = "0") -> StreamingResponse:
            self.asked.append(request.headers.get("last-event-id", after))
            return StreamingResponse(self._stream(int(self.asked[-1])), media_type="text/event-stream")

        return app

    def _body(self) -> dict[str, Any]:
        gateway = {"id": self._id, "version": "0.1", "uptime": time.monotonic() - self._began}
        return {"time": time.time(), "gateway": gateway, **NOTHING, **self.overview}

    async def _stream(self, last: int) -> AsyncIterator[str]:
        due, drops = 0.0, self._drops
        while not self._server.should_exit and drops == self._drops:
            if not self.silent:
                for number, event, data in [each for each in self._events if each[0] > last]:
                    last = number
                    yield f"id: {number}\nevent: {event}\ndata: {json.dumps(data)}\n\n"
                if time.monotonic() >= due:
                    due = time.monotonic() + _OVERVIEW_SECONDS
                    yield f": keep-alive\n\nevent: overview\ndata: {json.dumps(self._body())}\n\n"
            await asyncio.sleep(_TICK)
