"""The agent of this process's rank: embedded in the process, or a standalone one that it attaches to."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.membership.missing import REPORT_SECONDS, MissingRanks
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.host import host_id
from rankmesh_agent.net.http_client import HttpClient, HttpResponse, NoResponseError, UnauthenticatedServerError
from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.errors import (
    AgentTakenError,
    AuthenticationError,
    DistNetworkError,
    GatewayUnreachableError,
    from_code,
)
from rankmesh_agent.wire.schemas import (
    LONG_POLL_SECONDS,
    AgentHeartbeat,
    JoinReply,
    LeaseOffer,
    LeaseRequest,
    LeaseTerms,
    Member,
)

if TYPE_CHECKING:
    from rankmesh._rendezvous import Rendezvous
    from rankmesh_agent.agent import Agent
    from rankmesh_agent.remote.agent import RemoteAgent

_RETRY_SECONDS = 0.1
_ANSWER_SECONDS = 2.0
_WARNING_SECONDS = 5.0
"""Seconds without an agent after which a warning names the reason; further ones follow every REPORT_SECONDS."""

_log = logging.getLogger("rankmesh")


def agent_for(rendezvous: Rendezvous, settings: Settings, timeout: float) -> Agent | RemoteAgent:
    """Return the agent that carries this process's rank; it has joined the job.

    Args:
        rendezvous: the gateway and the rank to join with.
        settings: the settings in the environment.
        timeout: seconds for the join, and the default for calls.

    Raises:
        DistNetworkError: the join failed, or there is no agent to attach to; see its subclasses.
    """
    if rendezvous.hosting != "embedded":
        attached = _attached(rendezvous, settings, timeout)
        if attached is not None:
            return attached
    from rankmesh_agent.agent import Agent
    from rankmesh_agent.job_membership import JoinTerms

    deadline, awaits = Deadline(timeout), rendezvous.awaits_growth
    terms = JoinTerms(rendezvous.rank, rendezvous.world_size, timeout, deadline, awaits_growth=awaits)
    return Agent(settings, rendezvous.find, terms, host=rendezvous.bind_host)


def _attached(rendezvous: Rendezvous, settings: Settings, timeout: float) -> RemoteAgent | None:
    """Return a leased standalone agent; None if the gateway has none and an embedded one is allowed."""
    deadline = Deadline(timeout)
    client = HttpClient(settings.token)
    failure: DistNetworkError | None = None
    try:
        while True:
            offer = _offered(client, rendezvous, settings, deadline, failure)
            if offer is None:
                return None
            from rankmesh_agent.remote.agent import RemoteAgent

            size, awaits = rendezvous.world_size, rendezvous.awaits_growth
            terms = LeaseTerms(settings.job, rendezvous.rank, size, timeout, holder="", awaits_growth=awaits)
            try:
                with _reports(rendezvous, offer, settings, deadline):
                    return RemoteAgent(settings, offer, terms, deadline)
            except AgentTakenError as error:
                failure = error  # another process was faster: there may be another agent
            except DistNetworkError as error:
                if type(error) is not DistNetworkError or deadline.expired():
                    raise
                failure = error  # the agent cannot be reached, or has just ended
            time.sleep(min(_RETRY_SECONDS, deadline.remaining()))
    finally:
        client.close()


@contextlib.contextmanager
def _reports(rendezvous: Rendezvous, offer: AgentHeartbeat, settings: Settings, deadline: Deadline) -> Iterator[None]:
    """Log in this process, in a thread, what the agent that joins for it waits for: its own log is elsewhere."""
    ended = threading.Event()
    thread = threading.Thread(
        target=_report_until, args=(ended, rendezvous, offer, settings, deadline), name="rankmesh-join", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _report_until(
    ended: threading.Event, rendezvous: Rendezvous, offer: AgentHeartbeat, settings: Settings, deadline: Deadline
) -> None:
    job, size = settings.job, None if rendezvous.awaits_growth else rendezvous.world_size
    reports = MissingRanks(settings, size, deadline)
    client = HttpClient(settings.token)
    try:
        while not ended.wait(reports.seconds_to_next()):
            url = rendezvous.find()
            if url is None:
                return
            try:
                path = "waiting" if rendezvous.awaits_growth else f"ranks?{urlencode({'job': job})}"
                found = client.request("GET", f"{url}/v1/{path}", timeout=_ANSWER_SECONDS).json()
                members = [
                    Member(**each["member"])
                    for each in found
                    if each["job"] == job and each.get("state", "joining") == "joining"
                ]
            except (NoResponseError, ValueError, KeyError, TypeError):
                members = []  # the agent finds out and its error says why
            mine = next((each for each in members if (each.host_id, each.pid) == (offer.host_id, offer.pid)), None)
            if mine is not None:
                reports.ranks_missing(url, mine, JoinReply(False, job, 0, size or 0, members, []))
            else:
                reports.skip()
    finally:
        client.close()


def _offered(
    client: HttpClient, rendezvous: Rendezvous, settings: Settings, deadline: Deadline, failure: DistNetworkError | None
) -> AgentHeartbeat | None:
    """Request an agent from the gateway until there is one.

    Args:
        client: HTTP client.
        rendezvous: the gateway's address.
        settings: the settings in the environment.
        deadline: end of the attempts.
        failure: error of the last agent that was offered.

    Returns:
        None if no agent is registered and an embedded one is allowed.

    Raises:
        GatewayUnreachableError: there is no gateway.
        DistNetworkError: there is no free agent; names the processes that hold them.
    """
    warning = Deadline(_WARNING_SECONDS)
    reason, url = "", None
    while True:
        url = rendezvous.find()
        if url is not None:
            wait = min(LONG_POLL_SECONDS, deadline.remaining(), warning.remaining())
            here = host_id(settings.shm_dir)
            asked = LeaseRequest(settings.job, rendezvous.rank, rendezvous.world_size, here, wait)
            try:
                answer = client.request("POST", f"{url}/v1/leases", asked, timeout=wait + _ANSWER_SECONDS)
            except UnauthenticatedServerError as error:
                raise AuthenticationError(error.message, address=url) from error
            except NoResponseError as error:
                if rendezvous.hosting is None:
                    return None  # the embedded agent waits for the gateway
                reason = str(error)
            else:
                if answer.status == HTTPStatus.OK:
                    return _offer_in(answer, url)
                if answer.status == HTTPStatus.NOT_FOUND and rendezvous.hosting is None:
                    return None
                reason = _refusal(answer, url)
        if deadline.expired():
            break
        if warning.expired():
            _log.warning("this process still waits for a standalone agent of the gateway at %s: %s", url, reason)
            warning = Deadline(REPORT_SECONDS)
        time.sleep(min(_RETRY_SECONDS, deadline.remaining()))
    if failure is not None and not isinstance(failure, AgentTakenError):
        raise failure
    if url is None:
        raise GatewayUnreachableError(f"no gateway was found within {deadline.seconds:.0f} s to ask for an agent")
    raise DistNetworkError(
        f"no standalone agent of the gateway at {url} was free within {deadline.seconds:.1f} s: {reason or failure}",
        address=url,
    )


def _offer_in(answer: HttpResponse, url: str) -> AgentHeartbeat:
    try:
        return replace(json_text.read(LeaseOffer, answer.body).agent, leases=[])
    except (ValueError, TypeError):
        raise DistNetworkError(
            f"{url} is not a RankMesh gateway: its response to a request for an agent is something else", address=url
        ) from None


def _refusal(answer: HttpResponse, url: str) -> str:
    """Return the reason why there is no agent; raise if there will not be one."""
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
