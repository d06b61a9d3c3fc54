"""The agent of this process's rank: embedded in the process, or a standalone one that it attaches to."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from rankmesh_agent.config.settings import Settings
from rankmesh_agent.membership.gateway_client import RESPONSE_SECONDS, GatewayClient, RankEntry, UnavailableError
from rankmesh_agent.membership.missing import REPORT_SECONDS, MissingRanks
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.host import host_id
from rankmesh_agent.net.http_client import NoResponseError
from rankmesh_agent.wire.errors import (
    AgentTakenError,
    DistError,
    DistNetworkError,
    GatewayUnreachableError,
    NoAgentsError,
)
from rankmesh_agent.wire.schemas import (
    LONG_POLL_SECONDS,
    AgentHeartbeat,
    JoinReply,
    LeaseOffer,
    LeaseRequest,
    LeaseTerms,
)

if TYPE_CHECKING:
    from rankmesh._rendezvous import Rendezvous
    from rankmesh_agent.agent import Agent
    from rankmesh_agent.remote.agent import RemoteAgent

_RETRY_SECONDS = 0.1
_WARNING_SECONDS = 5.0
"""Seconds without an agent after which a warning names the reason; further ones follow every REPORT_SECONDS."""

_log = logging.getLogger("rankmesh")


def agent_for(rendezvous: Rendezvous, settings: Settings, timeout: float) -> Agent | RemoteAgent:
    """Return the agent that carries this process's rank; it has joined the job."""
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
    failure: DistNetworkError | None = None
    with contextlib.closing(GatewayClient(rendezvous.find, settings.token)) as gateway:
        while True:
            offer = _offered(gateway, rendezvous, settings, deadline, failure)
            if offer is None:
                return None
            from rankmesh_agent.remote.agent import RemoteAgent

            size, awaits = rendezvous.world_size, rendezvous.awaits_growth
            terms = LeaseTerms(settings.job, rendezvous.rank, size, timeout, holder="", awaits_growth=awaits)
            try:
                with _reports(gateway, rendezvous, offer, settings, deadline):
                    return RemoteAgent(settings, offer, terms, deadline)
            except AgentTakenError as error:
                failure = error  # another process was faster: there may be another agent
            except DistNetworkError as error:
                if type(error) is not DistNetworkError or deadline.expired():
                    raise
                failure = error  # the agent cannot be reached, or has just ended
            time.sleep(min(_RETRY_SECONDS, deadline.remaining()))


@contextlib.contextmanager
def _reports(
    gateway: GatewayClient, rendezvous: Rendezvous, offer: AgentHeartbeat, settings: Settings, deadline: Deadline
) -> Iterator[None]:
    """Log in this process, in a thread, what the agent that joins for it waits for: its own log is elsewhere."""
    ended = threading.Event()
    job, size = settings.job, None if rendezvous.awaits_growth else rendezvous.world_size
    path = "waiting" if rendezvous.awaits_growth else f"ranks?{urlencode({'job': job})}"

    def report() -> None:
        reports = MissingRanks(settings, size, deadline)
        with gateway.sibling() as client:
            while not ended.wait(reports.seconds_to_next()):
                client.locate()
                try:
                    found = client.read(list[RankEntry], path)
                except (UnavailableError, DistError):
                    found = []  # the agent finds out and its error says why
                members = [each.member for each in found if each.job == job and each.state == "joining"]
                mine = next((each for each in members if (each.host_id, each.pid) == (offer.host_id, offer.pid)), None)
                if mine is not None:
                    reports.ranks_missing(client.url, mine, JoinReply(False, job, 0, size or 0, members, []))
                else:
                    reports.skip()

    thread = threading.Thread(target=report, name="rankmesh-join", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _offered(
    gateway: GatewayClient,
    rendezvous: Rendezvous,
    settings: Settings,
    deadline: Deadline,
    failure: DistNetworkError | None,
) -> AgentHeartbeat | None:
    """Request an agent until the gateway offers one; None if none is registered and an embedded one is allowed."""
    warning = Deadline(_WARNING_SECONDS)
    reason = ""
    while True:
        gateway.url = rendezvous.find() or ""
        if gateway.url:
            wait = min(LONG_POLL_SECONDS, deadline.remaining(), warning.remaining())
            here = host_id(settings.shm_dir)
            asked = LeaseRequest(settings.job, rendezvous.rank, rendezvous.world_size, here, wait)
            try:
                return replace(gateway.read(LeaseOffer, "leases", asked, wait + RESPONSE_SECONDS).agent, leases=[])
            except (UnavailableError, NoAgentsError) as error:
                is_there = isinstance(error, UnavailableError) and not isinstance(error.__cause__, NoResponseError)
                if rendezvous.hosting is None and not is_there:
                    return None  # the embedded agent waits for the gateway
                reason = str(error)
        if deadline.expired():
            break
        if warning.expired():
            where = gateway.url or "an unknown address"
            _log.warning("this process still waits for a standalone agent of the gateway at %s: %s", where, reason)
            warning = Deadline(REPORT_SECONDS)
        time.sleep(min(_RETRY_SECONDS, deadline.remaining()))
    if failure is not None and not isinstance(failure, AgentTakenError):
        raise failure
    if not gateway.url:
        raise GatewayUnreachableError(f"no gateway was found within {deadline.seconds:.0f} s to ask for an agent")
    raise DistNetworkError(
        f"no standalone agent of the gateway at {gateway.url} was free within {deadline.seconds:.1f} s: "
        f"{reason or failure}",
        address=gateway.url,
    )
