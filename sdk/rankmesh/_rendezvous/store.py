"""``store=``, and ``env://`` under torchrun: a key-value store shared by all ranks contains the gateway's address."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from rankmesh._rendezvous.hosted import GatewayAddress, HostedGateway
from rankmesh._rendezvous.locator import GatewayLocator, configured_address, listen_address
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.wire.errors import DistNetworkError

_SLICE_SECONDS = 0.2
"""Length of one wait on a store without ``check``, so that deadlines and Ctrl-C take effect."""
_TORCHRUN_TIMEOUT = timedelta(seconds=60)
"""For the connection: torchrun creates the store before it starts the ranks."""


class StoreLocator(GatewayLocator):
    """Rank 0 hosts the gateway and writes its address to the store.

    The key is the job's. The next init with the same store overwrites it; a rank that still reads the old address
    finds no gateway with that id there, and reads again.

    Args:
        store: has ``set(key, value)``, ``get(key)`` and ``wait(keys, timeout)``, as torch's stores and ours;
            ``check(keys)`` is used if it exists.
    """

    def __init__(self, store: Any, rank: int, settings: Settings) -> None:
        super().__init__(settings, _address_towards_store(store, settings))
        self._store = store
        self._checks = hasattr(store, "check")
        self._key = f"rankmesh/{settings.job}/gateway"
        if rank == 0:
            self._hosted = HostedGateway(self.bind_host, 0, settings)
            try:
                store.set(self._key, self._hosted.address.to_json())
            except BaseException as error:
                self.close()
                raise self._failed(error) if isinstance(error, Exception) else error from error

    def find(self) -> str | None:
        if self._hosted is not None:
            return self._hosted.address.url
        if not self._has_address():
            return None
        try:
            there = GatewayAddress.from_json(self._store.get(self._key))
        except Exception as error:
            raise self._failed(error) from error
        return there.url if there is not None and there.is_there() else None

    def _has_address(self) -> bool:
        """Return whether the store contains an address, after a short wait."""
        if self._checks:
            try:
                return bool(self._store.check([self._key]))
            except Exception:  # an unsupported method of a base class, or a broken store
                self._checks = False
        began = time.monotonic()
        try:
            self._store.wait([self._key], timedelta(seconds=_SLICE_SECONDS))
        except Exception as error:
            if (
                time.monotonic() - began < _SLICE_SECONDS / 2
            ):  # too early for a timeout, whose class each store has its own
                raise self._failed(error) from error
            return False
        return True

    def _failed(self, error: Exception) -> DistNetworkError:
        return DistNetworkError(
            f"the store passed as store= ({type(self._store).__qualname__}) failed: {type(error).__name__}: {error}"
        )


def torchrun_store(host: str, port: int) -> Any:
    """Return torchrun's store, which listens at MASTER_ADDR and MASTER_PORT."""
    from torch.distributed import TCPStore

    try:
        return TCPStore(host, port, is_master=False, timeout=_TORCHRUN_TIMEOUT)
    except Exception as error:  # torch has error classes of its own
        raise DistNetworkError(
            f"cannot reach torchrun's store at MASTER_ADDR and MASTER_PORT, {host}:{port}: {error}. Another gateway's "
            "address belongs into RANKMESH_GATEWAY, or into init_method='tcp://host:port'",
            address=f"{host}:{port}",
        ) from error


def _address_towards_store(store: Any, settings: Settings) -> str:
    """Return the address to listen on: the one on the route to the store's host, if the store has one."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    if isinstance(host, str) and isinstance(port, int):
        return listen_address(settings, host, port)
    return configured_address(settings)
