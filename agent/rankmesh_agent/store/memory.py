"""The store of the agent that owns the keys and values."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from rankmesh_agent.store.base import Store
from rankmesh_agent.store.keys import check_keys
from rankmesh_agent.store.table import Table, Values
from rankmesh_agent.wire.errors import KeyNotFoundError, StoreTimeoutError

_NAMED = 10
"""How many missing keys a message lists."""


class MemoryStore(Store):
    """Keys and values in this process, for several threads and event loops at a time.

    Attributes:
        table: the same keys and values for callers that have no event loop.
    """

    def __init__(self) -> None:
        self.table = Table()

    async def get(self, key: str, wait_seconds: float = 0.0) -> bytes:
        value = self.table.get(key)
        if value is not None:
            return value
        found = await self._watched([key], wait_seconds)
        if found is None:
            raise KeyNotFoundError(f"nobody has set key {key!r}")
        return found[key]

    async def set(self, key: str, value: bytes) -> None:
        self.table.set(key, value)

    async def delete(self, key: str) -> bool:
        return self.table.delete(key)

    async def add(self, key: str, amount: int) -> int:
        return self.table.add(key, amount)

    async def wait(self, keys: Iterable[str], timeout: float) -> None:
        wanted = check_keys(keys)
        if await self._watched(wanted, timeout) is None and (missing := self.table.missing(wanted)):
            raise StoreTimeoutError(_absence(missing, len(wanted)))

    async def keys(self, prefix: str = "") -> list[str]:
        return self.table.keys(prefix)

    async def close(self) -> None:
        """Nothing to let go of."""

    async def _watched(self, keys: Iterable[str], seconds: float) -> Values | None:
        """Return the values once all keys are set, None if they are not within ``seconds``."""
        future = self.table.watch(keys)
        try:
            if not future.done():
                await asyncio.wait([asyncio.wrap_future(future)], timeout=max(0.0, seconds))
        finally:
            future.cancel()
        return None if future.cancelled() else future.result()


def _absence(missing: list[str], wanted: int) -> str:
    named = ", ".join(map(repr, missing[:_NAMED]))
    more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
    return f"{len(missing)} of {wanted} keys were not set in time: {named}{more}"
