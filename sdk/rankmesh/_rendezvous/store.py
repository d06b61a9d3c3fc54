"""``store=``: a key-value store that all ranks share says where the gateway is."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from rankmesh._rendezvous.hosted import Address, HostedGateway
from rankmesh._rendezvous.locator import LOOPBACK, Meeting, chosen_host, listen_on
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.wire.errors import DistNetworkError

_SLICE_SECONDS = 0.2
"""How long a store that can only wait is waited for at a time, so that deadlines and Ctrl-C get through."""


class AtStore(Meeting):
    """Rank 0 hosts the gateway and writes its address to the store.

    The key is the job's. The next init with the same store writes it anew; a rank that still reads the old address
    finds no gateway with that id there, and looks again.

    Args:
        store: has ``set(key, value)``, ``get(key)`` and ``wait(keys, timeout)``, as torch's and ours have;
            ``check(keys)`` is used if it has that, too.
        rank: this process's rank.
        settings: what the environment says.

    Raises:
        ValueError: rank 0 would listen beyond loopback without a token.
        DistNetworkError: rank 0 cannot listen, or the store fails.
    """

    def __init__(self, store: Any, rank: int, settings: Settings) -> None:
        super().__init__(settings, _towards(store, settings))
        self._store = store
        self._checks = hasattr(store, "check")
        self._key = f"rankmesh/{settings.job}/gateway"
        if rank == 0:
            self._hosted = HostedGateway(self.bind_host, 0, settings)
            try:
                store.set(self._key, self._hosted.address.encoded())
            except BaseException as error:
                self.close()
                raise self._failed(error) if isinstance(error, Exception) else error from error

    def find(self) -> str | None:
        if self._hosted is not None:
            return self._hosted.address.url
        if not self._written():
            return None
        try:
            there = Address.decoded(self._store.get(self._key))
        except Exception as error:
            raise self._failed(error) from error
        return there.url if there is not None and there.answers() else None

    def _written(self) -> bool:
        """Whether there is an address in the store, after waiting for it for a moment."""
        if self._checks:
            try:
                return bool(self._store.check([self._key]))
            except Exception:  # a method of a base class that the store does not support; or the store is broken
                self._checks = False
        began = time.monotonic()
        try:
            self._store.wait([self._key], timedelta(seconds=_SLICE_SECONDS))
        except Exception as error:
            if (
                time.monotonic() - began < _SLICE_SECONDS / 2
            ):  # each store has its own error for a timeout; this is none
                raise self._failed(error) from error
            return False
        return True

    def _failed(self, error: Exception) -> DistNetworkError:
        return DistNetworkError(
            f"the store that was given as store= ({type(self._store).__qualname__}) does not do its work: "
            f"{type(error).__name__}: {error}"
        )


def _towards(store: Any, settings: Settings) -> str:
    """Choose the address to listen on: the one that faces the store's host, if the store is at one."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    if isinstance(host, str) and isinstance(port, int):
        return listen_on(settings, host, port)
    return chosen_host(settings) or LOOPBACK
