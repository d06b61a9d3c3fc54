"""The rules of ``rankmesh doctor``: findings from the results of its probes."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from rankmesh._cli.probe import AgentProbe, Clock, Pair, ProbeResults
from rankmesh_gateway import humanize
from rankmesh_gateway.humanize import rate, seconds, size

CLOCK_SECONDS = 1.0
"""Clocks that differ by more than this are reported: logs of several hosts do not match."""
SLOW = 10
"""A pair is slow if the median of all pairs is this many times as fast."""
_SLOW_MATTERS = 50e6
"""Bytes a second above which no pair is slow."""
BUSY = 2.0
"""Processes for each processor of a host above which a late answer is no sign of a fault."""


class Finding(NamedTuple):
    """A finding.

    Attributes:
        level: ``problem``: an operation will fail; ``warning``: it may be slow or confusing.
        about: subject: ``pair``, ``agent``, ``gateway``, ``clock``, ``version``, ``shm`` or ``token``.
        names: the agents concerned.
        text: what, where, why, and what to do.
    """

    level: Literal["problem", "warning"]
    about: str
    names: tuple[str, ...]
    text: str


def evaluate(found: ProbeResults) -> list[Finding]:
    """Return the findings, problems first."""
    every = [
        *_agents(found),
        *_pairs(found),
        *_unmeasured(found),
        *_versions(found),
        *_clocks(found),
        *_memory(found),
        *_speed(found),
    ]
    return sorted(every, key=lambda finding: finding.level != "problem")


def _agents(found: ProbeResults) -> Iterator[Finding]:
    for job, waiting in found.joining.items():
        here = humanize.ranks(rank for rank in waiting if rank >= 0) or f"{len(waiting)} processes without a rank"
        text = f"job {job} waits for more ranks to join; {here} are there: look at what the others say"
        yield Finding("warning", "agent", (), text)
    live = {agent.job for agent in found.agents}
    for job, failures in found.failures.items():
        for each in failures:
            if job in live:
                yield Finding("problem", "agent", tuple(f"rank {rank}" for rank in each["ranks"]), each["text"])
            else:
                yield Finding("warning", "agent", (), f"job {job} is over: {each['text']}")
    for number, agent in enumerate(found.agents):
        which = f"{agent.name} ({agent.host}, pid {agent.pid})"
        if agent.state == "suspect":
            yield Finding("warning", "agent", (agent.name,), f"{which} is suspect: the gateway has no heartbeat of it")
        if agent.answers:
            continue
        why = agent.refusal or (agent.way.error if agent.way is not None else "it was not tried: time was over")
        others = [pair for pair in found.pairs if pair.target == number and pair.way is not None]
        reached = [found.agents[pair.source].name for pair in others if pair.reached]
        if reached:
            text = f"{which} cannot be asked from here, though {reached[0]} reaches it: {why}"
            yield Finding("warning", "agent", (agent.name,), text)
        else:
            tried = f"nor does any of {len(others)} others reach it" if others else "and there is no other agent to try"
            text = f"{which} cannot be asked from here, {tried}: {why}"
            busy = _busy(found, agent)
            if agent.process in ("T", "t"):
                text += f"; the process is stopped (state {agent.process}): kill -CONT {agent.pid} lets it go on"
            elif busy and agent.way is not None and (agent.way.stage in _LATE or agent.refusal):
                yield Finding("warning", "agent", (agent.name,), text + busy)
                continue
            yield Finding("problem", "agent", (agent.name,), text)


_LATE = ("answer", "transfer")
"""Stages at which a process is late that has no processor."""


def _busy(found: ProbeResults, agent: AgentProbe) -> str:
    """Return the end of a sentence about an agent that is late on a busy host; empty on others."""
    loads = [float(each.report["load"]) for each in found.agents if each.host == agent.host and each.report is not None]
    if agent.host == found.here["host"]:
        loads.append(found.here["load"])
    load = max(loads, default=0.0)
    if load < BUSY:
        return ""
    return (
        f"; {agent.host} is busy, with {load:.1f} processes for each of its processors: give more --patience before "
        "you look for a fault"
    )


def _pairs(found: ProbeResults) -> Iterator[Finding]:
    silent = {number for number, agent in enumerate(found.agents) if not agent.answers}
    failed = {(each.source, each.target): each.way for each in found.pairs if each.way is not None and not each.reached}
    for (source, target), way in sorted(failed.items()):
        back = failed.get((target, source))
        if back is not None and source > target:
            continue  # reported with the other direction
        if target in silent and not any(each.reached for each in found.pairs if each.target == target):
            continue  # reported for the agent, not for the pair
        one, other = found.agents[source], found.agents[target]
        names = (one.name, other.name)
        ours, theirs = f"{one.name} ({one.host})", f"{other.name} ({other.host})"
        how = f"{ours} and {theirs} do not reach each other" if back is not None else f"{ours} does not reach {theirs}"
        busy = (_busy(found, other) or _busy(found, one)) if way.stage in _LATE else ""
        yield Finding("warning" if busy else "problem", "pair", names, f"{how}: {way.error}{busy}")


def _unmeasured(found: ProbeResults) -> Iterator[Finding]:
    """Yield one finding for each reason why pairs were not measured."""
    why: dict[str, list[Pair]] = defaultdict(list)
    for pair in found.pairs:
        if pair.way is None and (pair.timed_out or found.agents[pair.source].answers):
            why[pair.untold].append(pair)
    for reason, pairs in why.items():
        first = f"{found.agents[pairs[0].source].name} to {found.agents[pairs[0].target].name}"
        which = f"the way from {first}" if len(pairs) == 1 else f"{len(pairs)} ways, that from {first} for one,"
        names = tuple(dict.fromkeys(found.agents[pair.source].name for pair in pairs))
        hint = "; give more of it by --timeout" if pairs[0].timed_out else ""
        verb = "was" if len(pairs) == 1 else "were"
        text = f"{which} {verb} not measured: {reason}{hint}"
        yield Finding("warning" if pairs[0].timed_out else "problem", "pair", names, text)


def _versions(found: ProbeResults) -> Iterator[Finding]:
    by: dict[str, list[str]] = defaultdict(list)
    by[str(found.here["version"])].append("this command")
    by[found.gateway["version"]].append("the gateway")
    for agent in found.agents:
        if agent.report is not None:
            by[str(agent.report["version"])].append(agent.name)
    if len(by) > 1:
        there = "; ".join(f"{version}: {', '.join(names)}" for version, names in sorted(by.items()))
        names = tuple(name for each in by.values() for name in each)
        yield Finding("problem", "version", names, f"RankMesh is not of one version everywhere: {there}; install one")


def _clocks(found: ProbeResults) -> Iterator[Finding]:
    clocks: list[tuple[str, Clock | None]] = [("the gateway's host", found.gateway["clock"])]
    clocks += [(f"the host of {agent.name}", agent.clock) for agent in found.agents]
    for whose, clock in clocks:
        if clock is not None and abs(clock.offset) - clock.uncertainty > CLOCK_SECONDS:
            way = "ahead of" if clock.offset > 0 else "behind"
            text = f"the clock of {whose} is {seconds(abs(clock.offset))} {way} this one; have NTP set both"
            yield Finding("warning", "clock", (whose,), f"{text} (logs will not fit together; ranks do not mind)")


def _memory(found: ProbeResults) -> Iterator[Finding]:
    for host in hosts(found.agents):
        free, need = host.free, host.need
        if host.trouble:
            text = f"ranks on {host.name} share no memory, so they are slower: {host.trouble}"
            yield Finding("warning", "shm", host.names, text)
        elif free is not None and need > free:
            yield Finding(
                "warning",
                "shm",
                host.names,
                f"{host.directory} on {host.name} has {size(free)} free, and one more group of its {len(host.names)} "
                f"ranks needs {size(need)}: collectives would go over TCP; enlarge it (docker run --shm-size, mount -o "
                "remount,size=) or set RANKMESH_SLOT_BYTES lower",
            )


class Host(NamedTuple):
    """A host whose ranks can share memory.

    Attributes:
        name: host name.
        names: its agents.
        directory: directory of shared memory files.
        total, free: bytes in that directory, None if it does not exist.
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
    from rankmesh_agent.shared_memory.slots import Slots

    by: dict[str, list[AgentProbe]] = defaultdict(list)
    for agent in agents:
        if agent.report is not None:
            by[str(agent.report["host_id"])].append(agent)
    found = []
    for there in by.values():
        report = there[0].report or {}
        count = len(there)
        slot = max(Slots.slot_bytes_on_host(int(report["slot_bytes"]), count), Slots.min_slot_bytes(count))
        need = Slots.bytes_for(count, slot) if count > 1 and report["transport"] != "tcp" else 0
        found.append(
            Host(
                there[0].host,
                tuple(agent.name for agent in there),
                str(report["shm_dir"]),
                report["shm_total"],
                report["shm_free"],
                need,
                str(report["shm_trouble"]) if count > 1 else "",
            )
        )
    return sorted(found, key=lambda host: host.name)


def _speed(found: ProbeResults) -> Iterator[Finding]:
    rates = {}
    for pair in found.pairs:
        if pair.way is not None and pair.way.reached and pair.way.seconds:
            rates[pair.source, pair.target] = pair.way.bytes / pair.way.seconds
    if len(rates) < 2:
        return
    usual = statistics.median(rates.values())
    for (source, target), measured in sorted(rates.items()):
        if measured * SLOW < usual and measured < _SLOW_MATTERS:
            one, other = found.agents[source], found.agents[target]
            text = f"{other.name} ({other.host}) sends to {one.name} ({one.host}) at {rate(measured)}"
            hint = f"{text}, others at {rate(usual)}: look at the way between these hosts"
            yield Finding("warning", "pair", (one.name, other.name), hint)
