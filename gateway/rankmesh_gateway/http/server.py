"""HTTP server of a gateway that is a process of its own."""

from __future__ import annotations

import socket

import uvicorn

from rankmesh_agent.http.middleware import Application
from rankmesh_agent.net.sockets import url_of
from rankmesh_gateway.state.registry import Registry


class GatewayServer(uvicorn.Server):
    """Uvicorn that prints when it is ready, and answers the waiting joins when it ends."""

    def __init__(self, app: Application, registry: Registry) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )
        self._registry = registry

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to serve, then print the URLs."""
        await super().startup(sockets)
        for listener in sockets or ():
            print(f"RankMesh gateway is ready at {url_of(listener)}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer the waiting joins, then stop."""
        self._registry.close()
        await super().shutdown(sockets)
