"""Client of the gateway. Plain HTTP; collectives never need it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.descriptors import DescriptorLimitError
from rankmesh_agent.net.http_client import HttpClient, HttpResponse, NoResponseError, UnauthenticatedServerError
from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.errors import (
    AuthenticationError,
    DistError,
    DistNetworkError,
    GatewayUnreachableError,
    RankFailedError,
    from_code,
)
from rankmesh_agent.wire.schemas import (
    NO_HEARTBEAT,
    AgentLeave,
    EpochRequest,
    GatewayHealth,
    Leave,
    Member,
    MembersRequest,
    RankInfo,
)

T = TypeVar("T")

ANY_EPOCH = 1
"""Epoch of a Leave before the join is complete: the gateway identifies the member by its instance."""
RETRY_SECONDS = 0.1
RESPONSE_SECONDS = 2.0
"""Time limit of a response, in addition to the wait that the request asks for, and that for other ranks' requests."""
UNAVAILABLE = frozenset({500, 502, 503, 504})
"""HTTP statuses of a gateway that is closing, say, or of a proxy in front of it."""


@dataclass
class RankEntry:
    """The parts that are read of an entry of a process that waits to join, or of a rank."""

    job: str
    member: Member
    state: str = "joining"


class UnavailableError(Exception):
    """The gateway cannot be reached, or cannot serve the request at the moment."""


class GatewayClient:
    """One connection to a gateway, with a job's token.

    Attributes:
        find: returns the gateway's base URL, or None while it is not known.
        url: the gateway's base URL, empty until it has been located.
    """

    def __init__(self, find: Callable[[], str | None], token: str) -> None:
        self.find = find
        self.url = ""
        self._token = token
        self._http = HttpClient(token)

    def sibling(self) -> contextlib.closing[GatewayClient]:
        """Return another client of the same gateway, for another thread or beside the heartbeats."""
        client = GatewayClient(self.find, self._token)
        client.url = self.url
        return contextlib.closing(client)

    def locate(self) -> None:
        """Ask for the gateway's URL again: it may have moved."""
        with contextlib.suppress(DistNetworkError):
            self.url = self.find() or self.url

    def request(self, path: str, document: object | None, seconds: float = RESPONSE_SECONDS) -> HttpResponse:
        """Send a request, a GET without a document; return the response. Raises as HttpClient does."""
        method = "GET" if document is None else "POST"
        return self._http.request(method, f"{self.url}/v1/{path}", document, timeout=seconds)

    def read(self, kind: type[T], path: str, document: object | None = None, seconds: float = RESPONSE_SECONDS) -> T:
        """Send a request; return what the response has.

        Raises:
            UnavailableError: there is no response, or none of the request's.
            AuthenticationError: the server is not authenticated.
            DistError: the gateway refuses, or the server is no gateway.
        """
        try:
            answer = self.request(path, document, seconds)
        except UnauthenticatedServerError as error:
            raise AuthenticationError(error.message, address=self.url) from error
        except NoResponseError as error:
            raise UnavailableError(str(error) or type(error).__name__) from error
        if answer.status in UNAVAILABLE:
            raise UnavailableError(str(self.refusal(answer)))
        if answer.status != HTTPStatus.OK:
            raise self.refusal(answer)
        try:
            return json_text.read(kind, answer.body)
        except (ValueError, TypeError):
            raise self._not_a_gateway(answer) from None

    def num_waiting(self, job: str, deadline: Deadline) -> int:
        """Return how many processes wait for the job's world to grow; raise GatewayUnreachableError if it is silent."""
        while True:
            try:
                return sum(each.job == job for each in self.read(list[RankEntry], "waiting"))
            except UnavailableError as error:
                if deadline.expired():
                    raise GatewayUnreachableError(
                        f"the gateway at {self.url} has not answered within {deadline.seconds:.1f} s which processes "
                        f"wait to join: {error}",
                        address=self.url or None,
                    ) from error
            self.locate()
            time.sleep(min(RETRY_SECONDS, deadline.remaining()))

    def members(self, job: str, epoch: int, ranks: Collection[int]) -> list[Member]:
        """Return the members with their addresses that the gateway knows; raise GatewayUnreachableError without one."""
        try:
            return self.read(list[Member], "members", MembersRequest(job, epoch, list(ranks)))
        except (UnavailableError, DistError) as error:
            raise GatewayUnreachableError(
                f"the gateway at {self.url} does not answer: {error}", address=self.url
            ) from error

    def raise_if_left(self, job: str, epoch: int) -> bool:
        """Raise if a rank of an epoch that is complete has left it; return whether the gateway has answered.

        Raises:
            RankFailedError: names the rank, and its reason; of several, one that did not leave because of another.
        """
        ended = self.ended_ranks(job, epoch)
        if ended is None:
            return False
        # All ranks are silent until they are connected. Of several, one that did not leave because of another.
        ended = [rank for rank in ended if not rank.reason.startswith(NO_HEARTBEAT)]
        for rank in sorted(ended, key=lambda rank: any(other != rank.member.rank for other in rank.failed_ranks)):
            raise RankFailedError(
                f"{rank.member.described()} {rank.state} during the join: {rank.reason or 'it was done'}",
                ranks=[rank.member.rank],
            )
        return True

    def ended_ranks(self, job: str, epoch: int) -> list[RankInfo] | None:
        """Return the ranks of an epoch that have left or failed, None if the gateway does not answer."""
        try:
            return self.read(list[RankInfo], "ended", EpochRequest(job, epoch))
        except (UnavailableError, DistError):
            return None

    def leave(self, leave: Leave) -> None:
        """Leave the job; a gateway that does not respond does not matter."""
        with contextlib.suppress(NoResponseError, DescriptorLimitError):
            self.request("leave", leave)

    def unregister(self, goodbye: AgentLeave) -> None:
        """Report the end of a standalone agent, likewise."""
        if self.url:
            with contextlib.suppress(NoResponseError):
                self.request("agents/leave", goodbye)

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def refusal(self, answer: HttpResponse) -> DistError:
        """Return the error that a response describes."""
        try:
            problem: dict[str, Any] = answer.json()
            code, detail = problem.pop("code"), problem.pop("detail")
        except (ValueError, KeyError, AttributeError, TypeError):
            return self._not_a_gateway(answer)
        return from_code(code, f"the gateway at {self.url} refuses: {detail}", **problem)

    def _not_a_gateway(self, answer: HttpResponse) -> DistNetworkError:
        return DistNetworkError(
            f"{self.url} is not a RankMesh gateway: it answered {answer.status}. Is the port another "
            "program's (torchrun's store listens on MASTER_PORT: start with 'rankmesh run' instead)?",
            address=self.url,
        )


def gateway_health(url: str, timeout: float = 2.0) -> GatewayHealth | None:
    """Return the health of the RankMesh gateway at ``url``, None if none answers within ``timeout`` seconds."""
    with contextlib.closing(HttpClient()) as http:
        try:
            return json_text.read(GatewayHealth, http.request("GET", f"{url}/health", timeout=timeout).body)
        except (NoResponseError, ValueError, TypeError):
            return None
