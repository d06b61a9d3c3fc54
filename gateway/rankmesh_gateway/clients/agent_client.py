"""Questions to the agents of ranks, to several at the same time; an agent that does not answer is an answer, too."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

import httpx

CONNECT_SECONDS = 2.0
"""How long connecting to an agent may take."""
MAX_ANSWER_BYTES = 1 << 20
"""The largest answer of an agent that is read."""
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=0)


class AgentReply(NamedTuple):
    """What an agent answered.

    Attributes:
        status: the HTTP status, 0 if it did not answer.
        document: the answer's JSON, None if it has none.
        detail: why it did not answer, or refuses; empty when it did as it was asked.
        code: the code of the problem it answered with, empty if it is none.
    """

    status: int
    document: Any
    detail: str
    code: str

    @property
    def ok(self) -> bool:
        """Whether it did as it was asked."""
        return not self.detail


class AgentClient:
    """Asks agents.

    A client is made for each question, and its connections closed after it: questions are few and far between, and
    agents come and go.

    Args:
        token: the job's token.
    """

    def __init__(self, token: str = "") -> None:
        self._headers = {"authorization": f"Bearer {token}"} if token else {}

    async def request(self, method: str, url: str, document: Any = None, *, seconds: float) -> AgentReply:
        """Ask one agent.

        Args:
            method: ``"GET"``, ``"POST"``, ``"DELETE"``.
            url: what.
            document: goes along as JSON unless it is None.
            seconds: how long the answer may take.
        """
        return (await self.request_all(method, {0: url}, document, seconds=seconds))[0]

    async def request_all(
        self, method: str, urls: Mapping[int, str], document: Any = None, *, seconds: float, all_or_none: bool = False
    ) -> dict[int, AgentReply]:
        """Ask several agents the same, at the same time.

        Args:
            method: ``"GET"``, ``"POST"``, ``"DELETE"``.
            urls: what to ask, by rank.
            document: goes along as JSON unless it is None.
            seconds: how long each answer may take.
            all_or_none: whether one that does not do as it is asked makes the others' answers useless: those that have
                not come by then are not waited for, and left out.

        Returns:
            What each answered, by rank, the first to answer first.
        """
        # Loading the authorities of TLS takes 20 ms, for which plain HTTP has no use.
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
                    if all_or_none and not all(said.ok for said in found.values()):
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
                    return AgentReply(
                        answer.status_code, None, f"its answer has more than {MAX_ANSWER_BYTES} bytes", ""
                    )
            return _parse(answer.status_code, bytes(body))
    except httpx.ConnectTimeout:
        return AgentReply(0, None, f"nobody answered at {url} within {timeout.connect:g} s", "")
    except (httpx.TimeoutException, TimeoutError):
        return AgentReply(0, None, f"{url} did not answer within {seconds:g} s", "")
    except httpx.ConnectError:
        return AgentReply(0, None, f"nobody listens at {url}", "")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return AgentReply(0, None, f"the answer of {url} broke off: {error or type(error).__name__}", "")


def _parse(status: int, body: bytes) -> AgentReply:
    try:
        document = json.loads(body) if body else None
    except ValueError:
        document = None
    if status < HTTPStatus.BAD_REQUEST:
        return AgentReply(status, document, "", "")
    problem = document if isinstance(document, dict) else {}
    return AgentReply(
        status, document, str(problem.get("detail") or f"it answered {status}"), str(problem.get("code") or "")
    )
