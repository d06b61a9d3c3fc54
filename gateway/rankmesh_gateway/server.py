"""A gateway: the registry of jobs, their stores, and the port at which both are served."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.http.server import HttpServer
from rankmesh_agent.net.descriptors import raise_limit
from rankmesh_agent.net.sockets import listen_unix
from rankmesh_agent.store.server import StoreServer
from rankmesh_agent.store.table import Quota
from rankmesh_agent.wire.credentials import Credentials
from rankmesh_agent.wire.hello import Service
from rankmesh_gateway.http.app import create_app
from rankmesh_gateway.state.job_stores import JobStores
from rankmesh_gateway.state.registry import Registry
from rankmesh_gateway.state.store_backend import StoreBackend
from rankmesh_gateway.torch_store import PREFACE, TorchStore

if TYPE_CHECKING:
    from rankmesh_gateway.state.registry_file import RegistryFile  # imports SQLite

_COLLECTED_OBJECTS = 20_000
"""New objects after which Python's garbage collector runs. Some thousand connections have a million objects, and the
default, 700, would take a tenth of the time of their joins."""


def prepare_process() -> None:
    """Set the limits of a process that is a gateway and nothing else."""
    raise_limit()
    gc.set_threshold(_COLLECTED_OBJECTS)


class Gateway:
    """A gateway at a port, from ``start`` to ``close``.

    Args:
        names: host names that requests may have, besides addresses and localhost.
        torch_store: serves torch's TCPStore clients; None for no such clients.
        file: keeps the state for the next gateway; it is closed with this one.
        backend: keeps the jobs' stores for the next gateway, in place of the file.
    """

    def __init__(
        self,
        http: HttpServer,
        settings: Settings,
        credentials: Credentials,
        *,
        names: Iterable[str] = (),
        torch_store: TorchStore | None = None,
        file: RegistryFile | None = None,
        backend: StoreBackend | None = None,
    ) -> None:
        self.registry = Registry()
        self._http = http
        self._credentials, self._names = credentials, tuple(names)
        self._torch_store, self._file = torch_store, file
        if file is not None:
            file.load(self.registry)
            file.follow(self.registry)
        quota = Quota(settings.store_keys, settings.store_bytes)
        if backend is None and file is not None:
            backend = file.stores
        self._stores = JobStores(self.registry, credentials, quota, backend)

    def start(self, on_failure: Callable[[], object] = lambda: None) -> None:
        """Begin to serve; ``on_failure``: called in another thread once the port cannot be served."""
        listener, name = listen_unix()
        self._http.start(
            lambda: create_app(self.registry, token=self._credentials, names=self._names, stores=self._stores),
            {Service.STORE: StoreServer(self._stores, self._credentials, unix_socket=name)},
            unix_listeners=[listener],
            protocols={} if self._torch_store is None else {PREFACE: self._torch_store.make_protocol},
            on_failure=on_failure,
        )

    def close(self) -> None:
        """Answer the requests that wait, stop serving, and write the rest of the state."""
        self.registry.close()
        self._http.close()
        if self._file is not None:
            self._file.close()
