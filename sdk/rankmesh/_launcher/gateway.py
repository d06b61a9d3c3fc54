"""The gateway that a launcher hosts; it is told how ranks ended, which nobody else sees as well."""

from __future__ import annotations

import signal
import socket
from typing import TYPE_CHECKING, Any

from rankmesh._launcher.plan import Plan
from rankmesh._launcher.rank import Rank
from rankmesh_agent.http.server import HttpServer

if TYPE_CHECKING:
    from rankmesh_gateway.state.registry import Registry


class LauncherGateway:
    """A gateway in the launcher's process.

    Args:
        job: the job it is for.
        listener: its listening socket.
    """

    def __init__(self, job: Plan, listener: socket.socket) -> None:
        self._job = job
        self._registry: Registry | None = None
        self._http = HttpServer(listener, "rankmesh-gateway")

    def start(self) -> None:
        """Begin to serve."""
        from rankmesh_gateway.state.registry import Registry

        self._registry = Registry()
        self._http.start(self._app)

    def note_ending(self, rank: Rank) -> None:
        """Take note that a rank's process has ended."""
        ending = rank.ending
        if self._registry is None or ending is None or not ending.status:
            return
        how = f"its process ended with {ending}"
        if ending.signal is not None and ending.signal == rank.sent:
            how += " from the launcher"
        elif ending.signal == signal.SIGKILL:
            how += ", which the kernel sends when memory runs out, or somebody's kill -9"
        self._registry.process_exited(self._job.job, rank.number, rank.pid, socket.gethostname(), how)

    def stop(self) -> None:
        """Send everyone away who waits or listens, then end the service."""
        if self._registry is not None:
            self._registry.close()
        self._http.close()

    def _app(self) -> Any:
        from rankmesh_gateway.http.app import create_app

        return create_app(self._registry, token=self._job.token, names=(self._job.options.master_addr,))
