"""HTTP client of the ranks' agents, for the same request to several at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

import httpx

from rankmesh_agent.net.httpx_proof import prove
from rankmesh_agent.net.tls import check_scheme, client_context
from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.credentials import for_job
from rankmesh_agent.wire.errors import ForbiddenJobError
from rankmesh_agent.wire.http_auth import MissingProofError, refusal

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
        token: the gateway's token.
    """

    def __init__(self, token: str = "") -> None:
        self._token = token

    async def request(self, method: str, url: str, document: Any = None, *, job: str, seconds: float) -> AgentReply:
        """Send a request to one agent.

        Args:
            method: ``"GET"``, ``"POST"``, ``"DELETE"``.
            url: the URL.
            document: the body, sent as JSON unless it is None.
            job: the agent's job, whose credential the request has.
            seconds: limit for the reply.
        """
        return (await self.request_all(method, {0: url}, document, job=job, seconds=seconds))[0]

    async def request_all(
        self,
        method: str,
        urls: Mapping[int, str],
        document: Any = None,
        *,
        job: str,
        seconds: float,
        all_or_none: bool = False,
    ) -> dict[int, AgentReply]:
        """Send the same request to several agents at once.

        Args:
            method: ``"GET"``, ``"POST"``, ``"DELETE"``.
            urls: the URLs, by rank.
            document: the body, sent as JSON unless it is None.
            job: the agents' job, whose credential the requests have.
            seconds: limit for each reply.
            all_or_none: whether one failure makes the other replies useless: those that have not come by then are
                left out.

        Returns:
            The replies by rank, in the order in which they came.
        """
        try:
            token = for_job(self._token, job)
        except ForbiddenJobError as error:  # restored from the file of a gateway with another token
            return {rank: AgentReply(0, detail=error.message) for rank in urls}
        # Loading the certificate authorities takes 20 ms, and plain HTTP does not need them.
        verify = client_context() if any(url.startswith("https:") for url in urls.values()) else False
        async with httpx.AsyncClient(limits=_LIMITS, trust_env=False, verify=verify, follow_redirects=False) as client:
            asking = {
                asyncio.ensure_future(_request(client, token, method, url, document, seconds)): rank
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


async def _request(
    client: httpx.AsyncClient, token: str, method: str, url: str, document: Any, seconds: float
) -> AgentReply:
    timeout = httpx.Timeout(seconds, connect=min(CONNECT_SECONDS, seconds))
    try:
        check_scheme(httpx.URL(url).scheme, url)
        request = client.build_request(method, url, json=document, timeout=timeout)
        async with asyncio.timeout(seconds):
            if token:
                return _parse(*await _request_proven(client, token, request))
            answer, body = await _exchange(client, request)
            return _parse(answer.status_code, body)
    except _ResponseTooLargeError as error:
        return AgentReply(error.status, detail=f"its answer has more than {MAX_ANSWER_BYTES} bytes")
    except MissingProofError as error:
        return AgentReply(error.status, detail=f"{url} is not the agent that it should be: {error}")
    except httpx.ConnectTimeout:
        return AgentReply(0, detail=f"no answer at {url} within {timeout.connect:g} s")
    except (httpx.TimeoutException, TimeoutError):
        return AgentReply(0, detail=f"{url} did not answer within {seconds:g} s")
    except httpx.ConnectError as error:
        if "SSL" in str(error):
            return AgentReply(0, detail=f"no TLS with {url}: {error}")
        return AgentReply(0, detail=f"no process listens at {url}")
    except ValueError as error:
        return AgentReply(0, detail=str(error))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return AgentReply(0, detail=f"the answer of {url} broke off: {error or type(error).__name__}")


async def _request_proven(client: httpx.AsyncClient, token: str, request: httpx.Request) -> tuple[int, bytes]:
    """Send a request with a proof of the token, and return status and body from an agent that proves it, too."""
    script = prove(request, token)
    sent = next(script)
    while True:
        answer, body = await _exchange(client, sent)
        try:
            sent = script.send((answer, body))
        except StopIteration as end:
            return (answer.status_code, body) if end.value else (HTTPStatus.UNAUTHORIZED, refusal(token))


class _ResponseTooLargeError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__()
        self.status = status


async def _exchange(client: httpx.AsyncClient, request: httpx.Request) -> tuple[httpx.Response, bytes]:
    """Send a request, and return the response and its body.

    Raises:
        _ResponseTooLargeError: the body is too long.
    """
    answer = await client.send(request, stream=True)
    try:
        body = bytearray()
        async for piece in answer.aiter_bytes():
            body += piece
            if len(body) > MAX_ANSWER_BYTES:
                raise _ResponseTooLargeError(answer.status_code)
        return answer, bytes(body)
    finally:
        await answer.aclose()


def _parse(status: int, body: bytes) -> AgentReply:
    try:
        document = json_text.loads(body) if body else None
    except ValueError:
        document = None
    if status < HTTPStatus.BAD_REQUEST:
        return AgentReply(status, document)
    problem = document if isinstance(document, dict) else {}
    detail = str(problem.get("detail") or f"it answered {status}")
    return AgentReply(status, document, detail, str(problem.get("code") or ""))
