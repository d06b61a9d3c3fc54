"""A store in one process that others use over the network."""

from __future__ import annotations

import os
import time
from datetime import timedelta

from rankmesh._stores.base import DEFAULT_TIMEOUT
from rankmesh._stores.commands import CommandStore
from rankmesh._stores.methods import timedelta_of
from rankmesh._stores.server import ServerReference, serve
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.greenlets import refuse_greenlets
from rankmesh_agent.net.sockets import url_for
from rankmesh_agent.store.client import StoreClient
from rankmesh_agent.store.commands import Add, Count
from rankmesh_agent.wire.errors import StoreTimeoutError

_WORKERS = "rankmesh/workers"
"""The key that counts the participants, when there is a world size."""
_PAUSE_SECONDS = 0.005
_LAST_PORT = 65535


class TCPStore(CommandStore):
    """A store whose keys are in the process that creates it with ``is_master=True``; other processes are its clients.

    The master serves its keys until it is closed or garbage-collected, on one port: to these stores in a binary
    protocol, to all other clients over HTTP, under ``/v1/store`` as an agent does. Clients need the master's
    RANKMESH_TOKEN, which is required beyond loopback.

    Args:
        host_name: name or address of the master, which listens there unless RANKMESH_BIND is set.
        port: the master's port; 0 at the master for any free one.
        world_size: number of participants, including the master; None or negative if it is not fixed.
        is_master: whether this process holds the keys.
        timeout: time limit for reaching the master, or for the participants to join, and the default of calls:
            timedelta or seconds.
        wait_for_workers: whether the master waits until ``world_size`` participants have joined.
        multi_tenant: whether masters of this process at the same host and port share their keys.
        master_listen_fd: descriptor of a socket bound to ``port``, on which the master listens; the store closes it.
        use_libuv: accepted and ignored.
        wait_for_worker: another name of ``wait_for_workers``.

    Raises:
        TypeError, ValueError: an argument is invalid, or the master would listen beyond loopback without a token.
        AddressInUseError: another socket listens at the master's address.
        DistBackendError: gevent or eventlet has made the threads of the master's process greenlets.
        DistNetworkError: no store is served there before the timeout, or it refuses the token.
        StoreTimeoutError: not all participants joined before the timeout.
    """

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta | float = DEFAULT_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
        *,
        wait_for_worker: bool | None = None,
    ) -> None:
        _check(host_name, port, world_size)
        settings = Settings.from_env(os.environ)
        allowed = timedelta_of(timeout)
        deadline = Deadline(allowed.total_seconds())
        waits = wait_for_workers if wait_for_worker is None else wait_for_worker
        expected = world_size if waits and world_size is not None and world_size > 0 else None
        self._host, self._port, self._token = host_name, port, settings.token
        if is_master:
            refuse_greenlets()
            reference = serve(host_name, port, settings, shared=multi_tenant, descriptor=master_listen_fd)
            self._port = reference.server.port
            super().__init__(reference, allowed)
        elif port == 0:
            raise ValueError("port 0, any free one, is for the master: clients need its number")
        else:
            client = self._client()
            super().__init__(client, allowed)
        try:
            if not is_master:
                client.execute_first(Add(_WORKERS) if expected else Count(), deadline)
            elif expected:
                self._wait_for_workers(expected, deadline)
        except BaseException:
            self.close()
            raise

    @property
    def host(self) -> str:
        """The master's name or address, as it was given."""
        return self._host

    @property
    def port(self) -> int:
        """The port on which the master listens."""
        return self._port

    def list_keys(self) -> list[str]:
        return [key for key in super().list_keys() if key != _WORKERS]

    def clone(self) -> TCPStore:
        found = TCPStore.__new__(TCPStore)
        found._host, found._port, found._token = self._host, self._port, self._token
        store = self._store.server.acquire() if isinstance(self._store, ServerReference) else self._client()
        CommandStore.__init__(found, store, self.timeout)
        return found

    def _wait_for_workers(self, expected: int, deadline: Deadline) -> None:
        """Wait at the master until all participants have joined."""
        joined = self._store.execute(Add(_WORKERS))
        while joined < expected:
            if deadline.expired():
                raise StoreTimeoutError(
                    f"{self!r}: waited {deadline.seconds:g} s for {expected} participants, and {joined} came, with "
                    "the master"
                )
            time.sleep(min(_PAUSE_SECONDS, deadline.remaining()))
            joined = self._store.execute(Add(_WORKERS, 0))

    def _client(self) -> StoreClient:
        return StoreClient(url_for(self._host, self._port), self._token)

    def _after_fork(self) -> None:
        """In a forked child: use the master over the child's own connections, also if the parent is the master."""
        super()._after_fork()
        self._use(self._client())

    def __repr__(self) -> str:
        return f"TCPStore({self._host!r}, {self._port})"


def _check(host_name: str, port: int, world_size: int | None) -> None:
    if not isinstance(host_name, str):
        raise TypeError(f"host_name must be a str, got {type(host_name).__qualname__}")
    for name, value in {"port": port, "world_size": world_size}.items():
        if not isinstance(value, int) and not (name == "world_size" and value is None):
            raise TypeError(f"{name} must be an int, got {type(value).__qualname__}")
    if not host_name:
        raise ValueError("host_name is empty: give the master's name or address")
    if not 0 <= port <= _LAST_PORT:
        raise ValueError(f"port must be between 0 and {_LAST_PORT}, got {port}")
    if world_size == 0:
        raise ValueError("world_size must not be 0: it counts the master, too; leave it out if it is not fixed")
