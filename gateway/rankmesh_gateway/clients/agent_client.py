"""HTTP client of the ranks' agents, for the same request to several at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any, NamedTuple

from rankmesh_agent.net.http_client import ConnectError, HttpClient, NoResponseError, ResponseTooLargeError
from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.credentials import for_job
from rankmesh_agent.wire.errors import AuthenticationError, DistError, ForbiddenJobError

CONNECT_SECONDS = 2.0
"""Limit for connecting to an agent."""
MAX_ANSWER_BYTES = 1 << 20
"""Limit of the bytes of a response."""
_CONCURRENCY = 256


class AgentReply(NamedTuple):
    """Reply of an agent, or the reason why there is none.

    Attributes:
        status: the HTTP status; 0 without a response.
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
    """Sends requests to agents, each over connections of its own: requests are rare, and agents come and go."""

    def __init__(self, token: str = "") -> None:
        self._token = token

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
        """Send the same request to several agents at once; return the replies by rank, in the order in which they came.

        If ``all_or_none``, those that have not come by the first failure are left out.
        """
        try:
            token = for_job(self._token, job)
        except ForbiddenJobError as error:  # restored from the file of a gateway with another token
            return {rank: AgentReply(0, detail=error.message) for rank in urls}
        clients = {rank: HttpClient(token) for rank in urls}
        pool = ThreadPoolExecutor(max(1, min(_CONCURRENCY, len(urls))), "rankmesh-agents")
        loop = asyncio.get_running_loop()
        asking = {
            loop.run_in_executor(pool, _request, clients[rank], method, url, document, seconds): rank
            for rank, url in urls.items()
        }
        found: dict[int, AgentReply] = {}
        try:
            end = loop.time() + seconds
            while len(found) < len(urls):
                waited = [task for task, rank in asking.items() if rank not in found]
                limit = max(0.0, end - loop.time())
                done, late = await asyncio.wait(waited, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                found |= {asking[task]: task.result() for task in done}
                if not done:
                    found |= {asking[task]: _late(urls[asking[task]], seconds) for task in late}
                if all_or_none and not all(reply.ok for reply in found.values()):
                    break
        finally:
            for client in clients.values():
                client.abort()
            pool.shutdown(wait=False, cancel_futures=True)
        return found


def _request(client: HttpClient, method: str, url: str, document: Any, seconds: float) -> AgentReply:
    connect_seconds = min(CONNECT_SECONDS, seconds)
    try:
        found = client.request(
            method, url, document, timeout=seconds, connect_seconds=connect_seconds, limit=MAX_ANSWER_BYTES
        )
        return _parse(found.status, found.body)
    except ResponseTooLargeError:
        return AgentReply(0, detail=f"its answer has more than {MAX_ANSWER_BYTES} bytes")
    except ConnectError as error:
        if isinstance(error.__cause__, TimeoutError):
            return AgentReply(0, detail=f"no answer at {url} within {connect_seconds:g} s")
        return AgentReply(0, detail=f"no process listens at {url}")
    except AuthenticationError as error:
        return AgentReply(0, detail=f"{url} is not the agent that it should be: {error}")
    except NoResponseError as error:
        if isinstance(error.__cause__, TimeoutError):
            return _late(url, seconds)
        return AgentReply(0, detail=f"the answer of {url} broke off: {error}")
    except (ValueError, DistError) as error:
        return AgentReply(0, detail=str(error))
    finally:
        client.close()


def _late(url: str, seconds: float) -> AgentReply:
    return AgentReply(0, detail=f"{url} did not answer within {seconds:g} s")


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
