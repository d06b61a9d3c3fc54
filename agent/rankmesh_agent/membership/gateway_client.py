"""Client of the gateway: join, heartbeats, leave. Plain HTTP; collectives never need it."""

from __future__ import annotations

import contextlib
import logging
import math
import random
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, TypeVar

from rankmesh_agent.membership.heartbeat_changes import HeartbeatChanges
from rankmesh_agent.membership.heartbeat_schedule import HeartbeatSchedule
from rankmesh_agent.membership.missing import NOT_LAUNCHED, LocalRankInfo, MissingRanks
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.descriptors import DescriptorLimitError, raise_if_exhausted_since, warn_exhausted
from rankmesh_agent.net.http_client import HttpClient, HttpResponse, NoResponseError, UnauthenticatedServerError
from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.errors import (
    AuthenticationError,
    DistBackendError,
    DistNetworkError,
    GatewayUnreachableError,
    RankFailedError,
    from_code,
)
from rankmesh_agent.wire.schemas import (
    HEARTBEAT_SECONDS,
    LISTED_MEMBERS,
    LONG_POLL_SECONDS,
    NO_HEARTBEAT,
    SUSPECT_SECONDS,
    AgentHeartbeat,
    AgentLeave,
    EpochRequest,
    GrowingWorld,
    Heartbeat,
    HeartbeatReply,
    JoinReply,
    JoinRequest,
    Leave,
    LostRank,
    Member,
    MembersRequest,
    RankInfo,
    RestartReply,
    failed_seconds,
)
from rankmesh_agent.wire.stats import HeartbeatStats

_log = logging.getLogger("rankmesh")

T = TypeVar("T")

ANY_EPOCH = 1
"""Epoch of a Leave before the join is complete: the gateway identifies the member by its instance."""
_RETRY_SECONDS = 0.1
_MAX_RETRY_SECONDS = 5.0
_MIN_POLL_SECONDS = 0.05
JOINS_A_SECOND = 2000
"""First requests of a large world in a second."""
_CHECK_SECONDS = 0.5
_HEARTBEAT_ATTEMPTS = 3
"""Heartbeats in a row at most: after the first one, the gateway may ask for a complete one, and for groups' ranks."""
_RESPONSE_SECONDS = 2.0
"""Time limit of a response, in addition to the wait that the request asks for, and that for other ranks' requests."""
_UNAVAILABLE = frozenset({500, 502, 503, 504})
"""HTTP statuses of a gateway that is closing, say, or of a proxy in front of it."""


@dataclass
class _Snapshot:
    """The part of the gateway's snapshot that is read."""

    ranks: list[RankInfo]


class _UnavailableError(Exception):
    """The gateway responds, but cannot serve the request at the moment."""


class GatewayClient:
    """One connection to a gateway.

    Args:
        find: returns the gateway's base URL, or None while it is not known; called again after each failure, because
            the gateway may have moved, or this process may have become its host.
        token: the job's token.
    """

    def __init__(self, find: Callable[[], str | None], token: str) -> None:
        self._find = find
        self._token = token
        self.url = ""
        self._last_response = time.monotonic()
        self._answered = self._unanswered = 0
        self._last_refusal: int | None = None
        self._declared_failed = False
        self._dropped_groups = self._reported_lost = 0
        self._changes = HeartbeatChanges()
        self._schedule = HeartbeatSchedule()
        self._http = HttpClient(token)

    def sibling(self) -> GatewayClient:
        """Return another client of the same gateway, for another thread."""
        client = GatewayClient(self._find, self._token)
        client.url = self.url
        return client

    def join(
        self,
        job: str,
        world_size: int,
        member: Member,
        deadline: Deadline,
        launched: LocalRankInfo = NOT_LAUNCHED,
        attempt: int = 0,
        *,
        awaits_growth: bool = False,
        growth: GrowingWorld | None = None,
        check: Callable[[], None] | None = None,
    ) -> JoinReply:
        """Join a job and wait until all ranks have joined; log from time to time what is missing.

        Args:
            job: the job's name.
            world_size: number of ranks in the job.
            member: the joining rank; if its rank is UNASSIGNED, the gateway assigns one to its instance.
            deadline: end of the attempts. An unreachable or closing gateway is tried again until then.
            launched: this process's place on its node.
            attempt: restarts of the job by its launcher before this process was started.
            awaits_growth, growth: see JoinRequest.
            check: called between requests, every _CHECK_SECONDS in worlds of up to LISTED_MEMBERS ranks, less often in
                larger ones; raises if the join has no point any more.

        Raises:
            GatewayUnreachableError: no gateway answers before the deadline.
            JoinTimeoutError: ranks are missing at the deadline; names them.
            RankTakenError, WorldSizeMismatchError: the gateway refuses.
        """
        growing = 0 if growth is None else growth.size
        missing = MissingRanks(job, None if awaits_growth else world_size, deadline, launched, growing)
        try:
            chain = launched.parent, list(launched.ancestors)
            request = JoinRequest(job, world_size, member, 0.0, attempt, awaits_growth, growth, *chain)
            return self._join_until(request, deadline, missing, check)
        except BaseException as error:
            if missing.last is not None:  # frees the rank for the next attempt
                reason = f"it gave up joining: {type(error).__name__}"
                self.leave(Leave(job, ANY_EPOCH, member.rank, member.instance, reason))
            raise

    def _join_until(
        self,
        request: JoinRequest,
        deadline: Deadline,
        missing: MissingRanks,
        check: Callable[[], None] | None,
    ) -> JoinReply:
        member = request.member
        failure = "its address is not known yet"
        url: str | None = None
        began = time.monotonic()
        scale = max(1.0, request.world_size / LISTED_MEMBERS)  # the gateway serves all ranks: each may ask less often
        retry = _RETRY_SECONDS
        interval = _CHECK_SECONDS * scale if check is not None else math.inf
        if scale > 1:
            time.sleep(min(random.random() * request.world_size / JOINS_A_SECOND, deadline.remaining() / 2))
        while not deadline.expired():
            if check is not None:
                check()
            raise_if_exhausted_since(began)  # the gateway in this process, if there is one, accepts no rank then
            url = url or self._find()
            if url is not None:
                self.url = url
                # A rank that gives up earlier, perhaps with the gateway in its process, has joined all the same:
                # the first request does not wait, and the last ones follow each other closely. Of many ranks, each
                # sends as few requests as it can.
                if scale > 1:
                    most = min(LONG_POLL_SECONDS * random.uniform(0.75, 1.0), deadline.remaining() / 2, interval)
                else:
                    most = min(LONG_POLL_SECONDS, deadline.remaining() / 2, missing.seconds_to_next(), interval)
                wait = max(_MIN_POLL_SECONDS, most) if missing.last is not None or scale > 1 else 0.0
                limit = min(wait, deadline.remaining()) + _RESPONSE_SECONDS + request.world_size / JOINS_A_SECOND
                try:
                    reply = self._join_once(url, replace(request, wait=wait), limit)
                except UnauthenticatedServerError as error:
                    raise AuthenticationError(error.message, address=url) from error
                except (NoResponseError, _UnavailableError) as error:
                    failure = str(error) or type(error).__name__
                else:
                    if reply.complete:
                        self._last_response = time.monotonic()
                        self._schedule.set_interval(reply.interval)
                        return reply
                    retry = _RETRY_SECONDS
                    missing.ranks_missing(url, member, reply)
                    time.sleep(min(_MIN_POLL_SECONDS, deadline.remaining()) if wait else 0)
                    continue
            missing.gateway_missing(url, member, failure)
            url = None
            time.sleep(min(retry if scale == 1 else retry * random.uniform(0.5, 1.0), deadline.remaining()))
            retry = min(2 * retry, _RETRY_SECONDS * scale, _MAX_RETRY_SECONDS)
        raise missing.timeout_error(self.url, member, failure)

    def _join_once(self, url: str, request: JoinRequest, limit: float) -> JoinReply:
        answer = self._post(url, "join", request, limit, compressed=request.world_size > LISTED_MEMBERS)
        if answer.status in _UNAVAILABLE:
            raise _UnavailableError(str(_refusal(answer, url)))
        if answer.status != HTTPStatus.OK:
            raise _refusal(answer, url)
        try:
            return json_text.read(JoinReply, answer.body)
        except (ValueError, TypeError):
            raise _not_a_gateway(answer, url) from None

    def heartbeat(self, heartbeat: Heartbeat) -> DistBackendError | None:
        """Send a rank's heartbeat; a gateway that is unreachable for the moment does not matter.

        After three intervals without a response the gateway is located again: it may have moved, or have ended with
        its host process and be this one's to host. The ranks' next heartbeats register them there.

        If the gateway has declared this rank failed, which is final, that is logged once.

        Returns:
            The error that ends this rank's groups, if all ranks of the job start again because its nodes have changed.
        """
        for _ in range(_HEARTBEAT_ATTEMPTS):
            answer = self._send_heartbeat("heartbeat", self._changes.reduced(heartbeat))
            reply = _heartbeat_reply(answer)
            if reply is None:
                self._changes.forget()
                self._schedule.retry()
                return None
            self._schedule.set_interval(reply.interval)
            if isinstance(reply, RestartReply):
                return reply.error()
            if reply.dropped_groups and not self._dropped_groups:
                _log.warning(
                    "%s has %d groups more than the gateway keeps: they are not shown there; destroy groups that are "
                    "no longer used",
                    heartbeat.member.described(),
                    reply.dropped_groups,
                )
            self._dropped_groups = reply.dropped_groups
            if heartbeat.member.rank in reply.failed and not self._declared_failed:
                self._declared_failed = True
                _log.warning(
                    "%s is failed for the gateway at %s: a peer lost its connection, or no heartbeat arrived for %g s. "
                    "That is final for epoch %d: further heartbeats are ignored; GET /v1/ranks has the reason",
                    heartbeat.member.described(),
                    self.url,
                    failed_seconds(self._schedule.interval),
                    heartbeat.epoch,
                )
            if not self._changes.acknowledge(reply):
                break
        return None

    def is_heartbeat_due(self, lost: Collection[LostRank]) -> bool:
        """Return whether a heartbeat is due: after the interval that the gateway has named, or earlier with news.

        Args:
            lost: the ranks that the heartbeat would report lost.
        """
        return self._schedule.is_due(len(lost))

    def agent_heartbeat(self, heartbeat: AgentHeartbeat) -> bool:
        """Send a standalone agent's heartbeat; return whether the gateway has accepted it.

        A refusal, because of a different token, say, is logged once.
        """
        if not self.url:
            self.url = self._find() or ""
        answer = self._send_heartbeat("agents", heartbeat) if self.url else None
        refusal = answer.status if answer is not None and answer.status not in {HTTPStatus.OK, *_UNAVAILABLE} else None
        if answer is not None and refusal is not None and refusal != self._last_refusal:
            _log.warning("standalone agent %s is not registered: %s", heartbeat.name, _refusal(answer, self.url))
        self._last_refusal = refusal
        return answer is not None and answer.status == HTTPStatus.OK

    def _send_heartbeat(self, path: str, heartbeat: Heartbeat | AgentHeartbeat) -> HttpResponse | None:
        """Send a heartbeat and return the response; locate the gateway again after a long silence."""
        answer = None
        try:
            answer = self._post(self.url, path, heartbeat)
        except NoResponseError:
            pass
        except DescriptorLimitError as error:
            warn_exhausted("a heartbeat could not be sent", error.__cause__ or error)
        if answer is not None and answer.status not in _UNAVAILABLE:
            self._answered += 1
            self._last_response = time.monotonic()
        else:
            self._unanswered += 1
        if time.monotonic() - self._last_response > SUSPECT_SECONDS * self._schedule.interval / HEARTBEAT_SECONDS:
            with contextlib.suppress(DistNetworkError):
                self.url = self._find() or self.url
        return answer

    def heartbeat_stats(self) -> HeartbeatStats:
        """Return counts of the heartbeats so far."""
        return HeartbeatStats(self._answered, self._unanswered, time.monotonic() - self._last_response)

    def leave(self, leave: Leave) -> None:
        """Leave the job; a gateway that has ended already does not matter."""
        with contextlib.suppress(NoResponseError, DescriptorLimitError):
            self._post(self.url, "leave", leave)

    def num_waiting(self, job: str, deadline: Deadline) -> int:
        """Return how many processes wait for the job's world to grow.

        Raises:
            GatewayUnreachableError: the gateway does not answer before the deadline.
        """
        while True:
            try:
                answer = self._http.request("GET", f"{self.url}/v1/waiting", None, timeout=_RESPONSE_SECONDS)
            except NoResponseError as error:
                failure = str(error) or type(error).__name__
            else:
                try:
                    if answer.status == HTTPStatus.OK:
                        return sum(each["job"] == job for each in answer.json())
                except (ValueError, KeyError, TypeError):
                    raise _not_a_gateway(answer, self.url) from None
                if answer.status not in _UNAVAILABLE:
                    raise _refusal(answer, self.url)
                failure = str(_refusal(answer, self.url))
            if deadline.expired():
                raise GatewayUnreachableError(
                    f"the gateway at {self.url} has not answered within {deadline.seconds:.1f} s which processes wait "
                    f"to join: {failure}",
                    address=self.url or None,
                )
            with contextlib.suppress(DistNetworkError):
                self.url = self._find() or self.url  # it may have moved
            time.sleep(min(_RETRY_SECONDS, deadline.remaining()))

    def members(self, job: str, epoch: int, ranks: Collection[int]) -> list[Member]:
        """Return those of some members of an epoch that the gateway knows, with their addresses.

        Raises:
            GatewayUnreachableError: it does not answer.
        """
        try:
            answer = self._post(self.url, "members", MembersRequest(job, epoch, list(ranks)))
            if answer.status == HTTPStatus.OK:
                return [Member(**member) for member in answer.json()]
            failure = str(_refusal(answer, self.url))
        except (NoResponseError, ValueError, TypeError) as error:
            failure = str(error) or type(error).__name__
        raise GatewayUnreachableError(f"the gateway at {self.url} does not answer: {failure}", address=self.url)

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
        return self._read(list[RankInfo], lambda: self._post(self.url, "ended", EpochRequest(job, epoch)))

    def ranks(self, job: str, epoch: int) -> list[RankInfo] | None:
        """Return the ranks of an epoch that the gateway knows, None if it does not answer."""
        # Not /v1/ranks: the gateway would import the web framework first, for seconds on a busy machine.
        found = self._read(
            _Snapshot, lambda: self._http.request("GET", f"{self.url}/v1/snapshot", None, timeout=_RESPONSE_SECONDS)
        )
        return None if found is None else [rank for rank in found.ranks if (rank.job, rank.epoch) == (job, epoch)]

    def _read(self, kind: type[T], request: Callable[[], HttpResponse]) -> T | None:
        try:
            answer = request()
            return json_text.read(kind, answer.body) if answer.status == HTTPStatus.OK else None
        except (NoResponseError, DistNetworkError, ValueError, TypeError):
            return None

    def unregister(self, goodbye: AgentLeave) -> None:
        """Report the end of a standalone agent; a gateway that has ended already does not matter."""
        if self.url:
            with contextlib.suppress(NoResponseError):
                self._post(self.url, "agents/leave", goodbye)

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _post(
        self,
        url: str,
        path: str,
        document: JoinRequest | Heartbeat | Leave | EpochRequest | MembersRequest | AgentHeartbeat | AgentLeave,
        timeout: float = _RESPONSE_SECONDS,
        *,
        compressed: bool = False,
    ) -> HttpResponse:
        return self._http.request("POST", f"{url}/v1/{path}", document, timeout=timeout, compressed=compressed)


def gateway_id(url: str, timeout: float = 2.0) -> str | None:
    """Return the random id of the RankMesh gateway at ``url``, None if none answers within ``timeout`` seconds."""
    http = HttpClient()
    try:
        health = http.request("GET", f"{url}/health", timeout=timeout).json()
        return str(health["id"]) if health["service"] == "rankmesh-gateway" else None
    except (NoResponseError, ValueError, KeyError, TypeError):
        return None
    finally:
        http.close()


def _refusal(answer: HttpResponse, url: str) -> Exception:
    try:
        problem: dict[str, Any] = answer.json()
        code, detail = problem.pop("code"), problem.pop("detail")
    except (ValueError, KeyError, AttributeError, TypeError):
        return _not_a_gateway(answer, url)
    return from_code(code, f"the gateway at {url} refuses: {detail}", **problem)


def _heartbeat_reply(answer: HttpResponse | None) -> HeartbeatReply | None:
    """Return the reply to a heartbeat; None without one."""
    if answer is None or answer.status != HTTPStatus.OK:
        return None
    try:
        reply = answer.json()
        return json_text.convert(RestartReply if "restart" in reply else HeartbeatReply, reply)
    except (ValueError, TypeError):
        return None


def _not_a_gateway(answer: HttpResponse, url: str) -> DistNetworkError:
    return DistNetworkError(
        f"{url} is not a RankMesh gateway: it answered {answer.status} to a join. Is the port another program's "
        "(torchrun's store listens on MASTER_PORT: start with 'rankmesh run' instead)?",
        address=url,
    )
