"""The checks of ``rankmesh doctor``: of the gateway, each agent and its host, and the path between each pair."""

from __future__ import annotations

import contextlib
import itertools
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, Literal, NamedTuple

from rankmesh._cli.client import ServiceClient
from rankmesh._cli.exit_codes import CommandError
from rankmesh._cli.overview import Finding, fetch_overview
from rankmesh_agent.diagnostics.probe import measure
from rankmesh_agent.diagnostics.process import state_of
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.shared_memory.slots import Slots
from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.schemas import ProbeReply, ProbeRequest, RankInfo
from rankmesh_gateway import humanize
from rankmesh_gateway.diagnosis.reports import newest_ranks
from rankmesh_gateway.humanize import rate, seconds, size

_CONCURRENCY = 16
_CLOCK_SAMPLES = 3
_DATE_LATE = 1.0
"""Mean delay and uncertainty of a Date header: whole seconds, updated once a second."""
_CLOCK_SECONDS = 1.0
"""Clocks that differ by more than this are reported: logs of several hosts do not match."""
_SLOW = 10
"""A pair is slow if the median of all pairs is this many times as fast."""
_SLOW_MATTERS = 50e6
"""Bytes a second above which no pair is slow."""
_BUSY = 2.0
"""Processes for each processor of a host above which a late answer is no sign of a fault."""
_LATE = ("answer", "transfer")
"""Stages at which a process is late that has no processor."""


class CheckResult(NamedTuple):
    """The result of a check that did not pass.

    Attributes:
        level: ``problem``: an operation will fail; ``warning``: it may be slow or confusing.
        about: subject: ``pair``, ``agent``, ``clock``, ``version`` or ``shm``.
        names: the agents concerned.
        text: what, where, why, and what to do.
    """

    level: Literal["problem", "warning"]
    about: str
    names: tuple[str, ...]
    text: str


@dataclass
class Clock:
    """Another host's clock: seconds ahead of the local one, and their possible error, half of the round trip."""

    offset: float
    uncertainty: float


@dataclass
class AgentProbe:
    """An agent and the results of its probes.

    Attributes:
        job, rank: of its rank; empty and None for a free agent.
        way: probe of the first URL that answers, else of the first one.
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
    def place(self) -> str:
        """The agent and its host."""
        return f"{self.name} ({self.host})"

    @property
    def url(self) -> str:
        """The reachable URL, else the first."""
        return self.way.url if self.way is not None and self.way.reached else self.urls[0]


@dataclass
class Pair:
    """The path from one agent to another; ``way``: the measurement, None if there is none."""

    source: AgentProbe
    target: AgentProbe
    way: ProbeReply | None = None
    untold: str = ""
    timed_out: bool = False

    @property
    def reached(self) -> bool:
        """True if the source has reached the target."""
        return self.way is not None and self.way.reached

    @property
    def names(self) -> tuple[str, str]:
        """The names of both agents."""
        return self.source.name, self.target.name

    @property
    def carrier(self) -> str:
        """The transport of its messages in their job, '' without a common job."""
        if self.target.rank is None or self.source.job != self.target.job:
            return ""
        carrier = self.source.transports.get(str(self.target.rank), "")
        return "shared memory" if carrier == "segment" else carrier


@dataclass
class ProbeResults:
    """This host, what the gateway lists, and the results of the probes."""

    here: dict[str, Any]
    gateway: dict[str, Any]
    agents: list[AgentProbe] = field(default_factory=list)
    joining: dict[str, list[int]] = field(default_factory=dict)
    problems: list[Finding] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)


# Probes


def probe_gateway(service: ServiceClient) -> dict[str, Any]:
    """Return the gateway's version, round trip and clock."""
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


def list_agents(service: ServiceClient, job: str) -> tuple[list[AgentProbe], dict[str, list[int]], list[Finding]]:
    """Return the agents of the live jobs' newest ranks and the free ones, the joining ranks by job, and the problems.

    The agents of joining ranks do not answer yet.
    """
    overview = fetch_overview(service, job)
    listed = json_text.convert(list[RankInfo], [each for each in overview["ranks"] if each["state"] != "left"])
    live = {each.job for each in listed if each.state != "failed"}
    joining: dict[str, list[int]] = defaultdict(list)
    for each in listed:
        if each.state == "joining":
            joining[each.job].append(each.member.rank)
    free, leased = [], {}
    for entry in overview["agents"]:
        agent = entry["agent"]
        if agent["leases"]:
            leased.update(dict.fromkeys(agent["urls"], agent))
        elif not job:
            place = agent["host"], agent["pid"], agent["urls"]
            free.append(AgentProbe(_agent_name(agent), "", None, *place, entry["state"], ""))
    found = []
    members = [each for each in newest_ranks(each for each in listed if each.state != "joining") if each.job in live]
    several = len({each.job for each in members}) > 1
    for member in members:
        carrier = leased.get(member.url)
        name = f"rank {member.rank}" + (f" of {member.job}" if several else "")
        name += f" ({_agent_name(carrier)})" if carrier else ""
        urls = list(dict.fromkeys([member.url, *(carrier["urls"] if carrier else [])]))
        place = member.host, member.pid, urls
        found.append(AgentProbe(name, member.job, member.rank, *place, member.state, member.reason))
    problems = [each for each in overview["problems"] if each["kind"] in ("failed", "suspect", "agent")]
    return found + free, dict(joining), problems


def _agent_name(agent: dict[str, Any]) -> str:
    name = str(agent["name"])
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
            agent.process = state_of(agent.pid) if agent.host == socket.gethostname() else ""
            return
        wait = max(0.1, min(patience, deadline.remaining()))
        with contextlib.closing(ServiceClient("agent", agent.url, secret, wait)) as service:
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

    _concurrently(found, one)


def probe_pairs(
    found: Sequence[AgentProbe], token: Callable[[str], str], patience: float, nbytes: int, deadline: Deadline
) -> list[Pair]:
    """Make each agent measure the path to each other one: the connection, then, with bytes to send, the rate."""
    made = {
        (source, target): Pair(one, other)
        for (source, one), (target, other) in itertools.permutations(enumerate(found), 2)
        if one.rank is None or other.rank is None or one.job == other.job  # ranks of one job, or that may become so
    }

    def ask(pair: Pair, amount: int = 0) -> None:
        if pair.source.report is None:
            pair.untold = f"{pair.source.name} cannot be asked"
            return
        for url in pair.target.urls:
            left = min(patience, deadline.remaining())
            if left <= 0:
                pair.untold, pair.timed_out = "the time was over", True
                return
            client = ServiceClient("agent", pair.source.url, token(pair.source.job), left + patience)
            with contextlib.closing(client) as service:
                try:
                    pair.way = ProbeReply(**service.post("/v1/probe", vars(ProbeRequest(url, amount, left))))
                except (CommandError, TypeError) as error:
                    pair.untold = str(error)
                    return
            if pair.way.reached:
                return

    _concurrently(made.values(), ask)
    if nbytes:
        good = {way: pair for way, pair in made.items() if pair.reached}
        for turn in rounds(len(found)):
            _concurrently([good[way] for way in turn if way in good], lambda pair: ask(pair, nbytes))
    return list(made.values())


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
    """Call a function for each item, some at a time; Ctrl-C cancels the calls that have not begun."""
    pool = ThreadPoolExecutor(_CONCURRENCY)
    try:
        for _ in pool.map(do, items):
            pass
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


# Rules


def evaluate(found: ProbeResults) -> list[CheckResult]:
    """Return the results of the checks that did not pass, problems first."""
    rules = (_known, _agents, _pairs, _unmeasured, _versions, _clocks, _memory, _speed)
    return sorted((each for rule in rules for each in rule(found)), key=lambda each: each.level != "problem")


def _known(found: ProbeResults) -> Iterator[CheckResult]:
    """Yield what the gateway knows."""
    for job, waiting in found.joining.items():
        here = humanize.ranks(rank for rank in waiting if rank >= 0) or f"{len(waiting)} processes without a rank"
        text = f"job {job} waits for more ranks to join; {here} are there: look at what the others say"
        yield CheckResult("warning", "agent", (), text)
    live = {agent.job for agent in found.agents}
    for each in found.problems:
        names = tuple(f"rank {rank}" for rank in each["ranks"]) or (each["name"],)
        if each["kind"] == "failed" and each["job"] not in live:
            yield CheckResult("warning", "agent", (), f"job {each['job']} is over: {each['text']}")
        else:
            yield CheckResult("problem" if each["severity"] == "failed" else "warning", "agent", names, each["text"])


def _agents(found: ProbeResults) -> Iterator[CheckResult]:
    for agent in found.agents:
        if agent.report is not None:
            continue
        why = agent.refusal or (agent.way.error if agent.way is not None else "it was not tried: time was over")
        others = [pair for pair in found.pairs if pair.target is agent and pair.way is not None]
        reached = [pair.source.name for pair in others if pair.reached]
        tried = f"nor does any of {len(others)} others reach it" if others else "and there is no other agent to try"
        tried = f"though {reached[0]} reaches it" if reached else tried
        text = f"{agent.name} ({agent.host}, pid {agent.pid}) cannot be asked from here, {tried}: {why}"
        stopped = agent.process in ("T", "t")
        late = agent.way is not None and (agent.way.stage in _LATE or bool(agent.refusal))
        busy = _busy(found, agent) if late and not stopped and not reached else ""
        if stopped and not reached:
            text += f"; the process is stopped (state {agent.process}): kill -CONT {agent.pid} lets it go on"
        yield CheckResult("warning" if reached or busy else "problem", "agent", (agent.name,), text + busy)


def _busy(found: ProbeResults, *agents: AgentProbe) -> str:
    """Return the end of a sentence about agents that are late on a busy host; empty on others."""
    for host in (agent.host for agent in agents):
        loads = [float(each.report["load"]) for each in found.agents if each.host == host and each.report is not None]
        load = max([*loads, *([found.here["load"]] if host == found.here["host"] else [])], default=0.0)
        if load >= _BUSY:
            return (
                f"; {host} is busy, with {load:.1f} processes for each of its processors: raise --request-timeout "
                "before you look for a fault"
            )
    return ""


def _pairs(found: ProbeResults) -> Iterator[CheckResult]:
    reachable = {pair.target.name for pair in found.pairs if pair.reached}
    failed = {pair.names: pair for pair in found.pairs if pair.way is not None and not pair.reached}
    for pair in failed.values():
        way, one, other = pair.way, pair.source, pair.target
        both = pair.names[::-1] in failed
        if way is None or (both and found.agents.index(one) > found.agents.index(other)):
            continue  # reported with the other direction
        if other.report is None and other.name not in reachable:
            continue  # reported for the agent, not for the pair
        how = f"{one.place} and {other.place} do not reach each other" if both else ""
        how = how or f"{one.place} does not reach {other.place}"
        busy = _busy(found, other, one) if way.stage in _LATE else ""
        yield CheckResult("warning" if busy else "problem", "pair", pair.names, f"{how}: {way.error}{busy}")


def _unmeasured(found: ProbeResults) -> Iterator[CheckResult]:
    """Yield one result for each reason why pairs were not measured."""
    why: dict[str, list[Pair]] = defaultdict(list)
    for pair in found.pairs:
        if pair.way is None and (pair.timed_out or pair.source.report is not None):
            why[pair.untold].append(pair)
    for reason, pairs in why.items():
        first = " to ".join(pairs[0].names)
        which = (
            f"the way from {first} was" if len(pairs) == 1 else f"{len(pairs)} ways, that from {first} for one, were"
        )
        names = tuple(dict.fromkeys(pair.source.name for pair in pairs))
        level, hint = ("warning", "; raise --timeout") if pairs[0].timed_out else ("problem", "")
        yield CheckResult(level, "pair", names, f"{which} not measured: {reason}{hint}")  # type: ignore[arg-type]


def _versions(found: ProbeResults) -> Iterator[CheckResult]:
    by = defaultdict(list, {str(found.here["version"]): ["this command"]})
    by[found.gateway["version"]].append("the gateway")
    for agent in found.agents:
        if agent.report is not None:
            by[str(agent.report["version"])].append(agent.name)
    if len(by) > 1:
        there = "; ".join(f"{version}: {', '.join(names)}" for version, names in sorted(by.items()))
        text = f"RankMesh is not of one version everywhere: {there}; install one"
        yield CheckResult("problem", "version", tuple(itertools.chain(*by.values())), text)


def _clocks(found: ProbeResults) -> Iterator[CheckResult]:
    clocks = {"the gateway's host": found.gateway["clock"]}
    clocks |= {f"the host of {agent.name}": agent.clock for agent in found.agents}
    for whose, clock in clocks.items():
        if clock is not None and abs(clock.offset) - clock.uncertainty > _CLOCK_SECONDS:
            way = "ahead of" if clock.offset > 0 else "behind"
            text = f"the clock of {whose} is {seconds(abs(clock.offset))} {way} this one; have NTP set both"
            yield CheckResult("warning", "clock", (whose,), f"{text} (logs will not fit together; ranks do not mind)")


class Host(NamedTuple):
    """The memory that the ranks of a host can share, and its agents.

    Attributes:
        total, free: bytes in its directory, None if it does not exist.
        need: bytes of one more group of all its ranks.
        trouble: the reason why memory cannot be shared, '' if it can.
    """

    name: str
    names: tuple[str, ...]
    directory: str
    total: int | None
    free: int | None
    need: int
    trouble: str


def hosts(agents: Sequence[AgentProbe]) -> list[Host]:
    """Return the hosts of the agents that answer, by name."""
    by: dict[str, list[AgentProbe]] = defaultdict(list)
    for agent in agents:
        if agent.report is not None:
            by[str(agent.report["host_id"])].append(agent)
    found = []
    for there in by.values():
        report, count = there[0].report or {}, len(there)
        slot = max(Slots.slot_bytes_on_host(int(report["slot_bytes"]), count), Slots.min_slot_bytes(count))
        need = Slots.bytes_for(count, slot) if count > 1 and report["transport"] != "tcp" else 0
        room = str(report["shm_dir"]), report["shm_total"], report["shm_free"]
        trouble = str(report["shm_trouble"]) if count > 1 else ""
        found.append(Host(there[0].host, tuple(agent.name for agent in there), *room, need, trouble))
    return sorted(found)


def _memory(found: ProbeResults) -> Iterator[CheckResult]:
    for host in hosts(found.agents):
        text = ""
        if host.trouble:
            text = f"ranks on {host.name} share no memory, so they are slower: {host.trouble}"
        elif host.free is not None and host.need > host.free:
            text = (
                f"{host.directory} on {host.name} has {size(host.free)} free, and one more group of its "
                f"{len(host.names)} ranks needs {size(host.need)}: collectives would go over TCP; enlarge it (docker "
                "run --shm-size, mount -o remount,size=) or set RANKMESH_SLOT_BYTES lower"
            )
        if text:
            yield CheckResult("warning", "shm", host.names, text)


def _speed(found: ProbeResults) -> Iterator[CheckResult]:
    ways = [(pair, pair.way) for pair in found.pairs if pair.way is not None and pair.way.reached]
    rates = [(pair, way.bytes / way.seconds) for pair, way in ways if way.seconds]
    usual = statistics.median(measured for _, measured in rates) if len(rates) > 1 else 0.0
    for pair, measured in rates:
        if measured * _SLOW < usual and measured < _SLOW_MATTERS:
            text = f"{pair.target.place} sends to {pair.source.place} at {rate(measured)}, others at {rate(usual)}"
            yield CheckResult("warning", "pair", pair.names, f"{text}: look at the way between these hosts")
