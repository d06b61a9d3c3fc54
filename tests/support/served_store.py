"""A client of a store in this process."""

from __future__ import annotations

from typing import TypeVar

from rankmesh_agent.http.server import HttpServer
from rankmesh_agent.net.sockets import bind, listen_unix
from rankmesh_agent.store.client import PendingCall, StoreClient
from rankmesh_agent.store.command import Command
from rankmesh_agent.store.server import StoreServer
from rankmesh_agent.store.table import Table
from rankmesh_agent.wire.hello import Service

T = TypeVar("T")


class ServedStore(StoreClient):
    """A client of a store of a server of its own, which starts with the first call.

    Args:
        table: the keys and values; a new one if left out.

    Attributes:
        table: see above.
    """

    def __init__(self, table: Table | None = None) -> None:
        self.table = table or Table()
        self._server = StoreServer(self.table, "", "test-store")
        self._http: HttpServer | None = None
        super().__init__("http://127.0.0.1:1")

    def submit(self, command: Command[T], idempotency_key: str = "") -> PendingCall[T]:
        if self._http is None:
            listener, name = listen_unix()
            self._http = HttpServer(bind("127.0.0.1", 0, purpose="test"), "test-store")
            self._http.start(lambda: None, {Service.STORE: self._server}, unix_listeners=[listener], on_demand=True)
            self._connector._unix_socket = name
        return super().submit(command, idempotency_key)

    def close(self) -> None:
        """End the server, too."""
        super().close()
        if self._http is not None:
            self._http.close()
