"""A store for callers with an event loop, in front of a table of this process."""

from __future__ import annotations

from rankmesh_agent.store.async_store import AsyncStore
from rankmesh_agent.store.client import StoreClient
from rankmesh_agent.store.server import SingleTable, StoreServer
from rankmesh_agent.store.table import Table


class ServedStore(AsyncStore):
    """A store of a server of its own, which starts with the first call.

    Args:
        table: the keys and values; a new one if left out.

    Attributes:
        table: see above.
    """

    def __init__(self, table: Table | None = None) -> None:
        self.table = table or Table()
        self._server = StoreServer(SingleTable(self.table, ""), "", "test-store")
        super().__init__(lambda: StoreClient("http://127.0.0.1:1", unix_socket=self._server.unix_socket()))

    def close(self) -> None:
        """End the server, too."""
        super().close()
        self._server.close()
