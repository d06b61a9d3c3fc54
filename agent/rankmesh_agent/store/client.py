"""The store of an agent that does not own the keys and values: it asks the agent that does, over HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict
from typing import Any, TypeVar, cast
from urllib.parse import quote

import httpx

from rankmesh_agent.store.base import Store
from rankmesh_agent.store.keys import check_key, check_keys
from rankmesh_agent.wire.deadline import Deadline
from rankmesh_agent.wire.errors import (
    BY_CODE,
    DistError,
    DistNetworkError,
    DistStoreError,
    KeyNotFoundError,
    StoreTimeoutError,
)
from rankmesh_agent.wire.schemas import LONG_POLL_SECONDS, StoreAdd, StoreWait

CONNECT_SECONDS = 5.0
"""How long the owner may take to accept a connection."""
ANSWER_SECONDS = 10.0
"""How long the owner may take to answer, besides the time it was asked to wait."""
IDLE_SECONDS = 2.0
"""How long an unused connection is kept: less than the 5 s after which uvicorn closes its end."""

T = TypeVar("T")


class RemoteStore(Store):
    """The store at another agent. It serves one event loop, the first that uses it.

    Args:
        base_url: URL of the agent that owns the keys and values.
        token: the job's token; empty for none.
    """

    def __init__(self, base_url: str, token: str = "") -> None:
        self._url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client: httpx.AsyncClient | None = None

    async def get(self, key: str, wait_seconds: float = 0.0) -> bytes:
        path = _path(key)

        async def ask(seconds: float) -> bytes:
            return (await self._ask("GET", path, seconds, params={"wait": seconds})).content

        return await _repeated(ask, wait_seconds)

    async def set(self, key: str, value: bytes) -> None:
        await self._ask("PUT", _path(key), content=value)

    async def delete(self, key: str) -> bool:
        try:
            await self._ask("DELETE", _path(key))
        except KeyNotFoundError:
            return False
        return True

    async def add(self, key: str, amount: int) -> int:
        check_key(key)
        answer = await self._ask("POST", "/v1/store/add", json=asdict(StoreAdd(key, amount)))
        return cast(int, answer.json()["value"])

    async def wait(self, keys: Iterable[str], timeout: float) -> None:
        wanted = list(check_keys(keys))

        async def ask(seconds: float) -> None:
            await self._ask("POST", "/v1/store/wait", seconds, json=asdict(StoreWait(wanted, seconds)))

        await _repeated(ask, timeout)

    async def keys(self, prefix: str = "") -> list[str]:
        return cast(list[str], (await self._ask("GET", "/v1/store", params={"prefix": prefix})).json())

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _ask(self, method: str, path: str, wait: float = 0.0, **content: Any) -> httpx.Response:
        """Send one request and return its answer, which may take ``wait`` seconds longer than others."""
        timeout = httpx.Timeout(wait + ANSWER_SECONDS, connect=CONNECT_SECONDS)
        try:
            answer = await self._connected().request(method, self._url + path, timeout=timeout, **content)
        except httpx.HTTPError as error:
            what = str(error) or type(error).__name__
            raise DistNetworkError(
                f"the agent at {self._url}, which owns the store, cannot be reached: {what}", address=self._url
            ) from error
        if not answer.is_success:
            raise self._error(answer)
        return answer

    def _connected(self) -> httpx.AsyncClient:
        """Return the client, made at the first call because it belongs to the event loop that runs then."""
        if self._client is None:
            # As many connections as there are waits, or those who wait would keep out those who set.
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=IDLE_SECONDS)
            self._client = httpx.AsyncClient(headers=self._headers, limits=limits, trust_env=False)
        return self._client

    def _error(self, answer: httpx.Response) -> DistError:
        """Return a store's error as the owner raised it; anything else is the owner's failure, not our caller's."""
        try:
            found = answer.json()
            code, detail = found["code"], found["detail"]
        except (ValueError, TypeError, KeyError):
            code, detail = "", "not RankMesh's"
        kind = BY_CODE.get(code)
        if kind is not None and issubclass(kind, DistStoreError):
            return kind(detail)
        return DistNetworkError(
            f"the agent at {self._url}, which owns the store, answered {answer.status_code}: {detail}",
            address=self._url,
        )


async def _repeated(ask: Callable[[float], Awaitable[T]], seconds: float) -> T:
    """Ask, one long poll after the other, until there is an answer or ``seconds`` are over."""
    deadline = Deadline(seconds)
    while True:
        try:
            return await ask(min(LONG_POLL_SECONDS, deadline.remaining()))
        except (KeyNotFoundError, StoreTimeoutError):
            if deadline.passed():
                raise


def _path(key: str) -> str:
    check_key(key)
    # Dots too: clients resolve the path segments '.' and '..', which are good keys.
    return "/v1/store/" + quote(key, safe="").replace(".", "%2E")
