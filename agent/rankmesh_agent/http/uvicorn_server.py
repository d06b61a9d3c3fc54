"""Uvicorn for a thread of a rank: it sleeps while nobody asks, and ends when it is told, not at its next look."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

import uvicorn

_TICK_SECONDS = 1.0
"""How often what uvicorn does by the clock is done: it writes the date that answers carry."""


class QuietServer(uvicorn.Server):
    """Looks around once a second, where uvicorn does ten times: most of what an idle rank would cost."""

    _loop: asyncio.AbstractEventLoop | None = None

    def end(self) -> None:
        """Finish the requests under way, then return from ``run``. For other threads."""
        self.should_exit = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended already
                self._loop.call_soon_threadsafe(self._told.set)

    def run_soon(self, work: Coroutine[Any, Any, None], timeout: float) -> bool:
        """Have the loop do something while it serves, and wait for that, ``timeout`` seconds at most; return whether
        it was asked. For other threads.
        """
        if self._loop is None or self._loop.is_closed():
            return False
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)
        return True

    async def main_loop(self) -> None:
        """Serve until told to end."""
        self._told = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        while not await self.on_tick(0):  # 0: each time is one for the date
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._told.wait(), _TICK_SECONDS)
