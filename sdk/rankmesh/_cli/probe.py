"""The probes of ``rankmesh doctor``: this host, the gateway, each agent, and every pair of agents."""

from __future__ import annotations

import contextlib
import itertools
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

from rankmesh._cli.client import ServiceClient
from rankmesh._cli.exit_codes import CommandError
from rankmesh._cli.overview import Finding, fetch_overview
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.diagnostics.probe import host_report, measure
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.sockets import interfaces
from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.schemas import ProbeReply, ProbeRequest, RankInfo
from rankmesh_gateway.diagnosis.reports import newest_ranks
from rankmesh_gateway.diagnosis.snapshots import process_state

CONCURRENCY = 16
"""Concurrent probes."""
_CLOCK_SAMPLES = 3
_DATE_LATE = 1.0
"""Mean delay and uncertainty of a Date header: whole seconds, updated once a second."""


@dataclass
class Clock:
    """Another host's clock.

    Attributes:
        offset: seconds ahead of the local clock.
        uncertainty: possible error in seconds: half of the round trip, whose asymmetry is unknown.
    """

    offset: float
    uncertainty: float


@dataclass
class AgentProbe:
    """An agent and the results of its probes.

    Attributes:
        name: display name: ``rank 2``, ``agent a-1``.
        job: its job, empty for a free agent.
        rank: its rank, None for a free agent.
        host: host name.
        pid: process id on that host.
        urls: base URLs, in the order they are tried.
        state: state at the gateway.
        reason: cause of a failure.
        way: probe of the first URL that answers, else of the first one.
        clock: its host's clock.
        report: its report on its host, None if it does not answer.
        transports: transport to each other rank of its job, by rank.
        refusal: error of a reachable agent.
        process: state letter of an agent's process on this host that does not answer, else empty.
    """

    name: str
    job: str
    rank: int | None
    host: str
    pid: int
    urls: list[str]
    state: str
    reason: str
    way: ProbeReply | None = None
    clock: Clock | None = None
    report: dict[str, Any] | None = None
    transports: dict[str, str] = field(default_factory=dict)
    refusal: str = ""
    process: str = ""

    @property
    def answers(self) -> bool:
        """True if the agent has answered."""
        return self.report is not None

    @property
    def url(self) -> str:
        """The reachable URL, else the first."""
        return self.way.url if self.way is not None and self.way.reached else self.urls[0]


@dataclass
class Pair:
    """The way from one agent to another.

    Attributes:
        source, target: indices of the agents.
        way: the measurement, None if there is none.
        untold: the reason why there is none.
        timed_out: whether the reason is the timeout.
    """

    source: int
    target: int
    way: ProbeReply | None = None
    untold: str = ""
    timed_out: bool = False

    @property
    def reached(self) -> bool:
        """True if the source has reached the target."""
        return self.way is not None and self.way.reached


@dataclass
class ProbeResults:
    """The results of all probes.

    Attributes:
        here: this host and its environment.
        gateway: the gateway's health, round trip and clock.
        agents: all agents.
        joining: the ranks that wait for others to join, by job.
        failures: the problems of ranks that have failed, by job.
        pairs: all pairs of agents.
    """

    here: dict[str, Any]
    gateway: dict[str, Any]
    agents: list[AgentProbe] = field(default_factory=list)
    joining: dict[str, list[int]] = field(default_factory=dict)
    failures: dict[str, list[Finding]] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)


def probe_host(settings: Settings, token: str) -> dict[str, Any]:
    """Return a description of this host and its environment."""
    addresses = dict(interfaces()) if sys.platform == "linux" else {}
    return {**vars(host_report(settings, bool(token))), "addresses": addresses}


def probe_gateway(service: ServiceClient) -> dict[str, Any]:
    """Return the gateway's version, round trip and clock.

    Raises:
        CommandError: the gateway does not answer.
    """
    service.get("/health")  # opens the connection
    began, before = time.time(), time.perf_counter()
    answer = service.request("GET", "/health")
    took = time.perf_counter() - before
    health = service.document_of("GET", "/health", answer)
    clock = None
    with contextlib.suppress(KeyError, ValueError, TypeError):
        date = parsedate_to_datetime(answer.headers["date"]).timestamp() + _DATE_LATE
        clock = Clock(date - (began + took / 2), _DATE_LATE + took / 2)
    return {"url": service.url, "version": str(health.get("version", "")), "round_trip": took, "clock": clock}


def list_agents(
    service: ServiceClient, job: str
) -> tuple[list[AgentProbe], dict[str, list[int]], dict[str, list[Finding]]]:
    """Return the agents of the ranks in the newest epoch of each job, then the free agents; and what has none.

    That is, by job, the joining ranks, which wait for others and whose agents do not answer yet, and the failures. The
    agents of a job that is over, as none of its ranks lives, are not listed.

    Raises:
        CommandError: the gateway does not answer, or has no such job.
    """
    overview = fetch_overview(service, job)
    listed = [each for each in overview["ranks"] if each["state"] != "left"]
    failures: dict[str, list[Finding]] = {}
    for each in overview["problems"]:
        if each["kind"] == "failed":
            failures.setdefault(each["job"], []).append(each)
    live = {each["job"] for each in listed if each["state"] != "failed"}
    joining: dict[str, list[int]] = {}
    for each in listed:
        if each["state"] == "joining":
            joining.setdefault(each["job"], []).append(each["member"]["rank"])
    free, leased = [], {}
    for each in overview["agents"]:
        agent = each["agent"]
        if agent["leases"]:
            leased.update(dict.fromkeys(agent["urls"], agent))
        elif not job:
            place = agent["host"], agent["pid"], agent["urls"]
            free.append(AgentProbe(_agent(agent["name"]), "", None, *place, each["state"], ""))
    found = []
    joined = [each for each in listed if each["state"] != "joining"]
    members = newest_ranks(json_text.convert(list[RankInfo], joined))
    several = len({each.job for each in members}) > 1
    for each in (each for each in members if each.job in live):
        carrier = leased.get(each.url)
        name = f"rank {each.rank}" + (f" of {each.job}" if several else "")
        name += f" ({_agent(carrier['name'])})" if carrier else ""
        urls = list(dict.fromkeys([each.url, *(carrier["urls"] if carrier else [])]))
        found.append(AgentProbe(name, each.job, each.rank, each.host, each.pid, urls, each.state, each.reason))
    return found + free, joining, failures


def _agent(name: str) -> str:
    return name if name.startswith("agent") else f"agent {name}"


def probe_agents(found: Sequence[AgentProbe], token: Callable[[str], str], patience: float, deadline: Deadline) -> None:
    """Probe each agent from here: its URLs, its clock, and its report on its host."""

    def one(agent: AgentProbe) -> None:
        secret = token(agent.job)
        for url in agent.urls:
            way = measure(url, secret, 0, min(patience, deadline.remaining()))
            if agent.way is None or way.reached:
                agent.way = way
            if way.reached:
                break
        if agent.way is None or not agent.way.reached:
            agent.process = process_state(agent.pid) if agent.host == socket.gethostname() else ""
            return
        service = ServiceClient("agent", agent.url, secret, max(0.1, min(patience, deadline.remaining())))
        try:
            for _ in range(_CLOCK_SAMPLES):
                began, before = time.time(), time.perf_counter()
                report = service.get("/v1/host")
                took = time.perf_counter() - before
                clock = Clock(float(report["time"]) - (began + took / 2), took / 2)
                if agent.clock is None or clock.uncertainty < agent.clock.uncertainty:
                    agent.clock = clock
                agent.report = report
            if agent.job:
                agent.transports = service.get("/v1/info")["transports"]
        except (CommandError, KeyError, TypeError, ValueError) as error:
            agent.refusal = str(error)
        finally:
            service.close()

    _concurrently(found, one)


def probe_pairs(
    found: Sequence[AgentProbe], token: Callable[[str], str], patience: float, nbytes: int, deadline: Deadline
) -> list[Pair]:
    """Make each agent measure the way to each other one: first the connection, then the bandwidth.

    Args:
        found: the agents.
        token: returns the credential for the agents of a job.
        patience: seconds for one probe.
        nbytes: bytes to send in each direction; 0 for none.
        deadline: of all probes; pairs not measured by then are marked.
    """
    made = [
        Pair(source, target)
        for (source, one), (target, other) in itertools.permutations(enumerate(found), 2)
        if one.rank is None or other.rank is None or one.job == other.job  # ranks of one job, or that may become so
    ]

    def ask(pair: Pair, amount: int) -> ProbeReply | None:
        source, target = found[pair.source], found[pair.target]
        if not source.answers:
            pair.untold = f"{source.name} cannot be asked"
            return None
        reply: ProbeReply | None = None
        for url in target.urls:
            seconds = min(patience, deadline.remaining())
            if seconds <= 0:
                pair.untold, pair.timed_out = "the time was over", True
                return reply
            with contextlib.closing(
                ServiceClient("agent", source.url, token(source.job), seconds + patience)
            ) as service:
                try:
                    reply = ProbeReply(**service.post("/v1/probe", vars(ProbeRequest(url, amount, seconds))))
                except (CommandError, TypeError) as error:
                    pair.untold = str(error)
                    return reply
            if reply.reached:
                return reply
        return reply

    def connect(pair: Pair) -> None:
        pair.way = ask(pair, 0)

    def send(pair: Pair) -> None:
        pair.way = ask(pair, nbytes) or pair.way

    _concurrently(made, connect)
    if nbytes:
        good = {(pair.source, pair.target): pair for pair in made if pair.reached}
        for turn in rounds(len(found)):
            _concurrently([good[way] for way in turn if way in good], send)
    return made


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield all ordered pairs of ``count`` agents in rounds, in each of which an agent occurs once at most."""
    places: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    half = len(places) // 2
    for _ in range(len(places) - 1):
        met = zip(places[:half], reversed(places[half:]), strict=True)
        there = [(one, other) for one, other in met if one is not None and other is not None]
        yield there
        yield [(other, one) for one, other in there]
        places.insert(1, places.pop())


def _concurrently(items: Iterable[Any], do: Callable[[Any], None]) -> None:
    """Call a function for each item, CONCURRENCY at a time; Ctrl-C cancels the calls that have not begun."""
    pool = ThreadPoolExecutor(CONCURRENCY)
    try:
        for _ in pool.map(do, items):
            pass
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
