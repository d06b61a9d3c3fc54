"""What a store does, wherever its keys and values are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable


class Store(ABC):
    """Keys (text) with values (bytes) that all ranks of a job share; after torch.distributed.Store.

    Every method raises InvalidKeyError for an empty or overlong key, and DistNetworkError when the keys are at another
    agent that does not answer.
    """

    @abstractmethod
    async def get(self, key: str, wait_seconds: float = 0.0) -> bytes:
        """Return the value of ``key``; wait for it if nobody has set it yet.

        Raises:
            KeyNotFoundError: the key was not set within ``wait_seconds``.
        """

    @abstractmethod
    async def set(self, key: str, value: bytes) -> None:
        """Store ``value`` under ``key``, in the place of an earlier value."""

    @abstractmethod
    async def delete(self, key: str) -> bool:
        """Remove ``key``; return whether it was there."""

    @abstractmethod
    async def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the number stored as decimal digits under ``key``, and return the sum.

        A missing key counts as 0.

        Raises:
            NotANumberError: the value is not decimal digits, or the sum would not fit into 64 bits.
        """

    @abstractmethod
    async def wait(self, keys: Iterable[str], timeout: float) -> None:
        """Return when all ``keys`` are set at the same time.

        Raises:
            StoreTimeoutError: some were not within ``timeout`` seconds; the message names them.
        """

    @abstractmethod
    async def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with ``prefix``, sorted."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of what the store holds besides memory. Call it in the event loop that used the store."""
