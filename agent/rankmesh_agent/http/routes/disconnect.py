"""Not working on for a client that has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

T = TypeVar("T")


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what ``work`` returns; cancel it when the client hangs up before.

    Raises:
        ClientDisconnect: the client hung up.
    """
    working = asyncio.ensure_future(work)
    try:
        await request.body()
        hang_up = asyncio.ensure_future(request.receive())  # after the body, only the end of the connection can come
        try:
            await asyncio.wait({working, hang_up}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hang_up.cancel()
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
