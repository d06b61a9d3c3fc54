"""What ``rankmesh doctor`` looks at: this host, the gateway, each agent, and every pair of agents."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

from rankmesh._cli.client import Service
from rankmesh._cli.exit_codes import CommandError
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.diagnostics.probe import measure, shm_room
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.sockets import address_of_interface
from rankmesh_agent.transports import shared_memory
from rankmesh_agent.wire.schemas import ProbeReply, ProbeRequest
from rankmesh_agent.wire.version import __version__

AT_ONCE = 16
"""How many are asked at a time."""
_CLOCK_LOOKS = 3
_DATE_LATE = 1.0
"""The Date header tells whole seconds, and is made once a second: it is this much late, this much more or less."""


@dataclass
class Clock:
    """Another host's clock.

    Attributes:
        offset: seconds it is ahead of ours.
        uncertainty: seconds that may be wrong: half of the round trip, as nobody knows which way took longer.
    """

    offset: float
    uncertainty: float


@dataclass
class Patient:
    """An agent that is looked at.

    Attributes:
        name: for people: ``rank 2``, ``agent a-1``.
        job: its job, empty for a free agent.
        rank: its rank, None for a free agent.
        host: host name.
        pid: process id on that host.
        urls: base URLs, in the order they are tried.
        state: as the gateway sees it.
        reason: why it failed.
        way: the way from here to the first URL that answers, or why none does.
        clock: its host's clock.
        report: what it says of its host, None if it does not answer.
        transports: what carries its messages to each other rank of its job, by rank.
        refusal: why not, where the way is fine.
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

    @property
    def answers(self) -> bool:
        """Whether it can be asked from here."""
        return self.report is not None

    @property
    def url(self) -> str:
        """The URL under which it is reached from here, or else the first."""
        return self.way.url if self.way is not None and self.way.reached else self.urls[0]


@dataclass
class Pair:
    """The way from one agent to another.

    Attributes:
        source, target: their places in the list of all.
        way: what was measured, None if it was not.
        untold: why it was not.
        late: whether that is because the time was over.
    """

    source: int
    target: int
    way: ProbeReply | None = None
    untold: str = ""
    late: bool = False


@dataclass
class Findings:
    """Everything that was found.

    Attributes:
        here: what this host has, and what the environment says.
        gateway: the gateway's health, its way and its clock.
        patients: all agents.
        joining: the ranks that wait for others to join, by job.
        pairs: all pairs of them.
    """

    here: dict[str, Any]
    gateway: dict[str, Any]
    patients: list[Patient] = field(default_factory=list)
    joining: dict[str, list[int]] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)


def here(settings: Settings, token: str) -> dict[str, Any]:
    """Return what this host has, and what the environment says."""
    total, free = shm_room(settings.shm_dir)
    return {
        "host": socket.gethostname(),
        "version": __version__,
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "addresses": dict(_addresses()),
        "shm_dir": settings.shm_dir,
        "shm_total": total,
        "shm_free": free,
        "shm_trouble": shared_memory.unsupported(),
        "token": bool(token),
    }


def _addresses() -> Iterator[tuple[str, str]]:
    for _, name in socket.if_nameindex():
        try:
            yield name, address_of_interface(name)
        except RuntimeError:  # it has none
            continue


def gateway(service: Service) -> dict[str, Any]:
    """Ask the gateway how it is.

    Raises:
        CommandError: it does not answer.
    """
    service.get("/health")  # the first opens the connection
    began, before = time.time(), time.perf_counter()
    answer = service.ask("GET", "/health")
    took = time.perf_counter() - before
    health = service.meaning("GET", "/health", answer)
    clock = None
    try:
        date = parsedate_to_datetime(answer.headers["date"]).timestamp() + _DATE_LATE
        clock = Clock(date - (began + took / 2), _DATE_LATE + took / 2)
    except (KeyError, ValueError, TypeError):
        pass
    return {"url": service.url, "version": str(health.get("version", "")), "round_trip": took, "clock": clock}


def patients(service: Service, job: str) -> tuple[list[Patient], dict[str, list[int]]]:
    """Return the agents that the gateway lists: of ranks, of the newest world of each job, and those without.

    Besides, the ranks that wait for others to join, by job: their agents do not answer yet.

    Raises:
        CommandError: it does not answer.
    """
    listed = [each for each in service.get("/v1/ranks") if each["state"] != "left" and job in ("", each["job"])]
    ranks = [each for each in listed if each["state"] != "joining"]
    joining: dict[str, list[int]] = {}
    for each in listed:
        if each["state"] == "joining":
            joining.setdefault(each["job"], []).append(each["member"]["rank"])
    newest: dict[str, int] = {}
    for each in ranks:
        newest[each["job"]] = max(each["epoch"], newest.get(each["job"], 0))
    several = len(newest) > 1
    found = []
    leased = {}
    for each in service.get("/v1/agents"):
        agent = each["agent"]
        if agent["leases"]:
            leased.update(dict.fromkeys(agent["urls"], agent))
        elif not job:
            found.append(
                Patient(_agent(agent["name"]), "", None, agent["host"], agent["pid"], agent["urls"], each["state"], "")
            )
    worlds = []
    for each in ranks:
        if each["epoch"] != newest[each["job"]]:
            continue
        member = each["member"]
        carrier = leased.get(member["http"])
        name = f"rank {member['rank']}" + (f" of {each['job']}" if several else "")
        name += f" ({_agent(carrier['name'])})" if carrier else ""
        urls = list(dict.fromkeys([member["http"], *(carrier["urls"] if carrier else [])]))
        worlds.append(
            Patient(
                name, each["job"], member["rank"], member["host"], member["pid"], urls, each["state"], each["reason"]
            )
        )
    return worlds + found, joining


def _agent(name: str) -> str:
    return name if name.startswith("agent") else f"agent {name}"


def examine(found: Sequence[Patient], token: str, patience: float, deadline: Deadline) -> None:
    """Ask each agent from here: whether it can be reached, its clock, and what its host has."""

    def one(patient: Patient) -> None:
        for url in patient.urls:
            way = measure(url, token, 0, min(patience, deadline.remaining()))
            if patient.way is None or way.reached:
                patient.way = way
            if way.reached:
                break
        if patient.way is None or not patient.way.reached:
            return
        service = Service("agent", patient.url, token, max(0.1, min(patience, deadline.remaining())))
        try:
            for _ in range(_CLOCK_LOOKS):
                began, before = time.time(), time.perf_counter()
                report = service.get("/v1/host")
                took = time.perf_counter() - before
                clock = Clock(float(report["time"]) - (began + took / 2), took / 2)
                if patient.clock is None or clock.uncertainty < patient.clock.uncertainty:
                    patient.clock = clock
                patient.report = report
            patient.transports = service.get("/v1/info")["transports"]
        except (CommandError, KeyError, TypeError, ValueError) as error:
            patient.refusal = str(error)
        finally:
            service.close()

    _each(found, one)


def pairs(found: Sequence[Patient], token: str, patience: float, nbytes: int, deadline: Deadline) -> list[Pair]:
    """Have each agent measure the way to each other one: first whether there is one, then how much goes through.

    Args:
        found: the agents.
        token: the job's token, empty for none.
        patience: seconds that one probe may take.
        nbytes: how many bytes to send each way; 0 for none.
        deadline: when all has to be over; what was not measured by then says so.
    """
    made = [Pair(i, j) for i in range(len(found)) for j in range(len(found)) if i != j and _meet(found[i], found[j])]

    def ask(pair: Pair, amount: int) -> ProbeReply | None:
        source, target = found[pair.source], found[pair.target]
        if not source.answers:
            pair.untold = f"{source.name} cannot be asked"
            return None
        reply: ProbeReply | None = None
        for url in target.urls:
            seconds = min(patience, deadline.remaining())
            if seconds <= 0:
                pair.untold, pair.late = "the time was over", True
                return reply
            service = Service("agent", source.url, token, seconds + patience)
            try:
                said = service.post("/v1/probe", vars(ProbeRequest(url, amount, seconds)))
                reply = ProbeReply(**said)
            except (CommandError, TypeError) as error:
                pair.untold = str(error)
                return reply
            finally:
                service.close()
            if reply.reached:
                return reply
        return reply

    def connect(pair: Pair) -> None:
        pair.way = ask(pair, 0)

    def send(pair: Pair) -> None:
        way = ask(pair, nbytes)
        if way is not None:
            pair.way = way

    _each(made, connect)
    if nbytes:
        good = {(pair.source, pair.target): pair for pair in made if pair.way is not None and pair.way.reached}
        for turn in turns(len(found)):
            _each([good[way] for way in turn if way in good], send)
    return made


def _meet(one: Patient, other: Patient) -> bool:
    """Whether two agents have to do with each other: ranks of one job, or agents that may become so."""
    return one.rank is None or other.rank is None or one.job == other.job


def turns(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield all ordered pairs of ``count`` agents, in turns in which each has to do with one other at most."""
    places: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    half = len(places) // 2
    for _ in range(len(places) - 1):
        met = [(one, other) for one, other in zip(places[:half], reversed(places[half:]), strict=True)]
        there = [(one, other) for one, other in met if one is not None and other is not None]
        yield there
        yield [(other, one) for one, other in there]
        places.insert(1, places.pop())


def _each(items: Iterable[Any], do: Callable[[Any], None]) -> None:
    """Do something with each of some items, AT_ONCE at a time; Ctrl-C does not wait for those that have not begun."""
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        for _ in pool.map(do, items):
            pass
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
