"""HTTP client of the ranks' agents, for the same request to several at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

import httpx

CONNECT_SECONDS = 2.0
"""Limit for connecting to an agent."""
MAX_ANSWER_BYTES = 1 << 20
"""Limit of the bytes of a response."""
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)


class AgentReply(NamedTuple):
    """Reply of an agent, or the reason why there is none.

    Attributes:
        status: the HTTP status; 0 without a response.
        document: the response's JSON; None without.
        detail: why there is no response, or why the request failed; empty if it succeeded.
        code: the code of the problem document; empty without.
    """

    status: int
    document: Any = None
    detail: str = ""
    code: str = ""

    @property
    def ok(self) -> bool:
        """True if the request succeeded."""
        return not self.detail


class AgentClient:
    """Sends requests to agents.

    Each request has connections of its own, closed after it: requests are rare, and agents come and go.

    Args:
        token: the job's token.
    """

    def __init__(self, token: str = "") -> None:
        self._headers = {"authorization": f"Bearer {token}"} if token else {}

    async def request(self, method: str, url: str, document: Any = None, *, seconds: float) -> AgentReply:
        """Send a request to one agent.

        Args:
            method: ``"GET"``, ``"POST"``, ``"DELETE"``.
            url: the URL.
            document: the body, sent as JSON unless it is None.
            seconds: limit for the reply.
        """
        return (await self.request_all(method, {0: url}, document, seconds=seconds))[0]

    async def request_all(
        self, method: str, urls: Mapping[int, str], document: Any = None, *, seconds: float, all_or_none: bool = False
    ) -> dict[int, AgentReply]:
        """Send the same request to several agents at once.

        Args:
            method: ``"GET"``, ``"POST"``, ``"DELETE"``.
            urls: the URLs, by rank.
            document: the body, sent as JSON unless it is None.
            seconds: limit for each reply.
            all_or_none: whether one failure makes the other replies useless: those that have not come by then are
                left out.

        Returns:
            The replies by rank, in the order in which they came.
        """
        # verify=False: loading the TLS authorities takes 20 ms, and the agents' URLs are plain HTTP.
        async with httpx.AsyncClient(
            headers=self._headers, limits=_LIMITS, trust_env=False, verify=False, follow_redirects=False
        ) as client:
            asking = {
                asyncio.ensure_future(_request(client, method, url, document, seconds)): rank
                for rank, url in urls.items()
            }
            found: dict[int, AgentReply] = {}
            try:
                while len(found) < len(urls):
                    waited = [task for task, rank in asking.items() if rank not in found]
                    done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                    found |= {asking[task]: task.result() for task in done}
                    if all_or_none and not all(reply.ok for reply in found.values()):
                        break
            finally:
                for task in asking:
                    task.cancel()
                await asyncio.gather(*asking, return_exceptions=True)
        return found


async def _request(client: httpx.AsyncClient, method: str, url: str, document: Any, seconds: float) -> AgentReply:
    timeout = httpx.Timeout(seconds, connect=min(CONNECT_SECONDS, seconds))
    try:
        async with asyncio.timeout(seconds), client.stream(method, url, json=document, timeout=timeout) as answer:
            body = bytearray()
            async for piece in answer.aiter_bytes():
                body += piece
                if len(body) > MAX_ANSWER_BYTES:
                    return AgentReply(answer.status_code, detail=f"its answer has more than {MAX_ANSWER_BYTES} bytes")
            return _parse(answer.status_code, bytes(body))
    except httpx.ConnectTimeout:
        return AgentReply(0, detail=f"no answer at {url} within {timeout.connect:g} s")
    except (httpx.TimeoutException, TimeoutError):
        return AgentReply(0, detail=f"{url} did not answer within {seconds:g} s")
    except httpx.ConnectError:
        return AgentReply(0, detail=f"no process listens at {url}")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return AgentReply(0, detail=f"the answer of {url} broke off: {error or type(error).__name__}")


def _parse(status: int, body: bytes) -> AgentReply:
    try:
        document = json.loads(body) if body else None
    except ValueError:
        document = None
    if status < HTTPStatus.BAD_REQUEST:
        return AgentReply(status, document)
    problem = document if isinstance(document, dict) else {}
    detail = str(problem.get("detail") or f"it answered {status}")
    return AgentReply(status, document, detail, str(problem.get("code") or ""))
