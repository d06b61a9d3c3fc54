"""Where this process's rank is carried: by an agent in this process, or by a standalone one that it attaches to."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.http_client import HttpClient, HttpResponse, NoResponseError
from rankmesh_agent.transports import shared_memory
from rankmesh_agent.wire.errors import (
    AgentTakenError,
    AuthenticationError,
    DistNetworkError,
    GatewayUnreachableError,
    from_code,
)
from rankmesh_agent.wire.schemas import LONG_POLL_SECONDS, AgentHeartbeat, LeaseRequest

if TYPE_CHECKING:
    from rankmesh._rendezvous import Rendezvous
    from rankmesh_agent.agent import Agent
    from rankmesh_agent.remote.agent import RemoteAgent

_RETRY_SECONDS = 0.1
_ANSWER_SECONDS = 2.0
_PATIENCE = 5.0
"""Seconds in vain after which a warning says what this process waits for."""

_log = logging.getLogger("rankmesh")


def agent_for(meeting: Rendezvous, settings: Settings, timeout: float) -> Agent | RemoteAgent:
    """Return the agent that carries this process's rank; it has joined the job.

    Args:
        meeting: where and as whom to join.
        settings: what the environment says.
        timeout: seconds for the join, and the default for calls.

    Raises:
        DistNetworkError: the join failed, or there is no agent to attach to; the subclass and the message say how.
    """
    if meeting.hosting != "embedded":
        attached = _attached(meeting, settings, timeout)
        if attached is not None:
            return attached
    from rankmesh_agent.agent import Agent

    return Agent(
        settings,
        meeting.find,
        rank=meeting.rank,
        world_size=meeting.world_size,
        host=meeting.bind_host,
        timeout=timeout,
    )


def _attached(meeting: Rendezvous, settings: Settings, timeout: float) -> RemoteAgent | None:
    """Return an agent that was leased; None if the gateway has none and need not have."""
    deadline = Deadline(timeout)
    asker = HttpClient(settings.token)
    failure: DistNetworkError | None = None
    try:
        while True:
            offer = _offered(asker, meeting, settings, deadline, failure)
            if offer is None:
                return None
            from rankmesh_agent.remote.agent import RemoteAgent

            try:
                return RemoteAgent(
                    settings,
                    offer,
                    rank=meeting.rank,
                    world_size=meeting.world_size,
                    timeout=timeout,
                    deadline=deadline,
                )
            except AgentTakenError as error:
                failure = error  # somebody was faster: there may be another one
            except DistNetworkError as error:
                if type(error) is not DistNetworkError or deadline.expired():
                    raise
                failure = error  # it cannot be reached, or has just ended
            time.sleep(min(_RETRY_SECONDS, deadline.remaining()))
    finally:
        asker.close()


def _offered(
    asker: HttpClient, meeting: Rendezvous, settings: Settings, deadline: Deadline, failure: DistNetworkError | None
) -> AgentHeartbeat | None:
    """Ask the gateway for an agent until there is one.

    Args:
        asker: asks.
        meeting: where the gateway is.
        settings: what the environment says.
        deadline: when to give up.
        failure: what became of the last agent that was offered.

    Returns:
        None if no agent is registered and this process may have its own.

    Raises:
        GatewayUnreachableError: there is no gateway.
        DistNetworkError: there is no agent; says who has them.
    """
    patience = Deadline(_PATIENCE)
    why, url = "", None
    while True:
        url = meeting.find()
        if url is not None:
            wait = min(LONG_POLL_SECONDS, deadline.remaining())
            host_id = shared_memory.host_id(settings.shm_dir)
            asked = LeaseRequest(settings.job, meeting.rank, meeting.world_size, host_id, wait)
            try:
                answer = asker.request("POST", f"{url}/v1/leases", asdict(asked), timeout=wait + _ANSWER_SECONDS)
            except NoResponseError as error:
                if meeting.hosting is None:
                    return None  # the agent of this process knows best how to wait for a gateway
                why = str(error)
            else:
                if answer.status == HTTPStatus.OK:
                    return _offer_in(answer, url)
                if answer.status == HTTPStatus.NOT_FOUND and meeting.hosting is None:
                    return None
                why = _refusal(answer, url)
        if deadline.expired():
            break
        if patience.expired():
            _log.warning("this process still waits for a standalone agent at the gateway at %s: %s", url, why)
            patience = Deadline(deadline.remaining() + 1)
        time.sleep(min(_RETRY_SECONDS, deadline.remaining()))
    if failure is not None and not isinstance(failure, AgentTakenError):
        raise failure
    if url is None:
        raise GatewayUnreachableError(f"no gateway was found within {deadline.seconds:.0f} s to ask for an agent")
    raise DistNetworkError(
        f"no standalone agent of the gateway at {url} was to be had within {deadline.seconds:.1f} s: {why or failure}",
        address=url,
    )


def _offer_in(answer: HttpResponse, url: str) -> AgentHeartbeat:
    try:
        said = answer.json()["agent"]
        return AgentHeartbeat(**{**said, "leases": []})
    except (ValueError, KeyError, TypeError):
        raise DistNetworkError(
            f"{url} is not a RankMesh gateway: it answered a question for an agent with something else", address=url
        ) from None


def _refusal(answer: HttpResponse, url: str) -> str:
    """Return why there is no agent; raise if there will not be one."""
    try:
        problem: dict[str, Any] = answer.json()
        code, detail = str(problem["code"]), str(problem["detail"])
    except (ValueError, KeyError, TypeError, AttributeError):
        code, detail = "", f"it answered {answer.status}"
    error = from_code(code, f"the gateway at {url} refuses: {detail}")
    if answer.status == HTTPStatus.UNAUTHORIZED or isinstance(error, AuthenticationError):
        raise AuthenticationError(error.message, address=url)
    if answer.status in (HTTPStatus.UNPROCESSABLE_ENTITY, HTTPStatus.MISDIRECTED_REQUEST):
        raise DistNetworkError(error.message, address=url)
    return detail
