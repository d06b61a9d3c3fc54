"""What is wrong, as told from what ``rankmesh doctor`` has found: what, where, why, and what to do."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from rankmesh._cli import humanize
from rankmesh._cli.humanize import rate, seconds, size
from rankmesh._cli.probe import Clock, Findings, Pair, Patient

CLOCK_SECONDS = 1.0
"""Clocks that differ by more than this are worth a word: logs of several hosts do not fit together."""
SLOW = 10
"""A pair is slow if others are so many times as fast."""
_SLOW_MATTERS = 50e6
"""Bytes a second above which no pair is called slow."""


class Finding(NamedTuple):
    """Something that is wrong.

    Attributes:
        level: ``problem``, what will not work, or ``warning``, what may not work as well as it could.
        about: what it is about: ``pair``, ``agent``, ``gateway``, ``clock``, ``version``, ``shm`` or ``token``.
        names: the agents concerned.
        text: what, where, why and what to do.
    """

    level: Literal["problem", "warning"]
    about: str
    names: tuple[str, ...]
    text: str


def diagnose(found: Findings) -> list[Finding]:
    """Return what is wrong, the worst first."""
    every = [
        *_agents(found),
        *_pairs(found),
        *_untold(found),
        *_versions(found),
        *_clocks(found),
        *_memory(found),
        *_speed(found),
    ]
    return sorted(every, key=lambda finding: finding.level != "problem")


def _agents(found: Findings) -> Iterator[Finding]:
    for job, waiting in found.joining.items():
        here = humanize.ranks(rank for rank in waiting if rank >= 0) or f"{len(waiting)} processes without a rank"
        text = f"job {job} waits for more ranks to join; {here} are there: look at what the others say"
        yield Finding("warning", "agent", (), text)
    for number, patient in enumerate(found.patients):
        who = f"{patient.name} ({patient.host}, pid {patient.pid})"
        if patient.state in ("failed", "suspect"):
            why = f": {patient.reason}" if patient.reason else ", as it is silent"
            level: Literal["problem", "warning"] = "problem" if patient.state == "failed" else "warning"
            yield Finding(level, "agent", (patient.name,), f"{who} is {patient.state} for the gateway{why}")
        if patient.answers:
            continue
        why = patient.refusal or (patient.way.error if patient.way is not None else "it was not tried: time was over")
        others = [pair for pair in found.pairs if pair.target == number and pair.way is not None]
        reached = [found.patients[pair.source].name for pair in others if pair.way is not None and pair.way.reached]
        if reached:
            text = f"{who} cannot be asked from here, though {reached[0]} reaches it: {why}"
            yield Finding("warning", "agent", (patient.name,), text)
        else:
            nobody = f"nor does any of {len(others)} others reach it" if others else "and nobody else was there to try"
            yield Finding("problem", "agent", (patient.name,), f"{who} cannot be asked from here, {nobody}: {why}")


def _pairs(found: Findings) -> Iterator[Finding]:
    silent = {number for number, patient in enumerate(found.patients) if not patient.answers}
    failed = {(pair.source, pair.target): pair for pair in found.pairs if pair.way is not None and not pair.way.reached}
    for (source, target), pair in sorted(failed.items()):
        back = failed.get((target, source))
        if back is not None and source > target:
            continue  # it is told with the other way
        if target in silent and _all_fail(found.pairs, target):
            continue  # it is the agent's trouble, not that of a pair
        one, other = found.patients[source], found.patients[target]
        assert pair.way is not None
        names = (one.name, other.name)
        ours, theirs = f"{one.name} ({one.host})", f"{other.name} ({other.host})"
        how = f"{ours} and {theirs} do not reach each other" if back is not None else f"{ours} does not reach {theirs}"
        yield Finding("problem", "pair", names, f"{how}: {pair.way.error}")


def _untold(found: Findings) -> Iterator[Finding]:
    """Say which pairs were not measured, and why: each reason once."""
    why: dict[str, list[Pair]] = defaultdict(list)
    for pair in found.pairs:
        if pair.way is None and (pair.late or found.patients[pair.source].answers):
            why[pair.untold].append(pair)
    for reason, pairs in why.items():
        first = f"{found.patients[pairs[0].source].name} to {found.patients[pairs[0].target].name}"
        which = f"the way from {first}" if len(pairs) == 1 else f"{len(pairs)} ways, that from {first} for one,"
        names = tuple(dict.fromkeys(found.patients[pair.source].name for pair in pairs))
        hint = "; give more of it by --timeout" if pairs[0].late else ""
        verb = "was" if len(pairs) == 1 else "were"
        text = f"{which} {verb} not measured: {reason}{hint}"
        yield Finding("warning" if pairs[0].late else "problem", "pair", names, text)


def _all_fail(pairs: Sequence[Pair], target: int) -> bool:
    return not any(pair.way.reached for pair in pairs if pair.target == target and pair.way is not None)


def _versions(found: Findings) -> Iterator[Finding]:
    by: dict[str, list[str]] = defaultdict(list)
    by[str(found.here["version"])].append("this command")
    by[found.gateway["version"]].append("the gateway")
    for patient in found.patients:
        if patient.report is not None:
            by[str(patient.report["version"])].append(patient.name)
    if len(by) > 1:
        there = "; ".join(f"{version}: {', '.join(names)}" for version, names in sorted(by.items()))
        names = tuple(name for each in by.values() for name in each)
        yield Finding("problem", "version", names, f"RankMesh is not of one version everywhere: {there}; install one")


def _clocks(found: Findings) -> Iterator[Finding]:
    clocks: list[tuple[str, Clock | None]] = [("the gateway's host", found.gateway["clock"])]
    clocks += [(f"the host of {patient.name}", patient.clock) for patient in found.patients]
    for whose, clock in clocks:
        if clock is not None and abs(clock.offset) - clock.uncertainty > CLOCK_SECONDS:
            way = "ahead of" if clock.offset > 0 else "behind"
            text = f"the clock of {whose} is {seconds(abs(clock.offset))} {way} this one; have NTP set both"
            yield Finding("warning", "clock", (whose,), f"{text} (logs will not fit together; ranks do not mind)")


def _memory(found: Findings) -> Iterator[Finding]:
    for host in hosts(found.patients):
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
    """A host with ranks that can share memory.

    Attributes:
        name: host name.
        names: its agents.
        directory: where memory is shared.
        total, free: bytes there, None if there is none.
        need: bytes that one more group of all its ranks takes.
        trouble: why no memory is shared there.
    """

    name: str
    names: tuple[str, ...]
    directory: str
    total: int | None
    free: int | None
    need: int
    trouble: str


def hosts(patients: Sequence[Patient]) -> list[Host]:
    """Return the hosts of the agents that answer, by name."""
    from rankmesh_agent.transports.segment import Segment

    by: dict[str, list[Patient]] = defaultdict(list)
    for patient in patients:
        if patient.report is not None:
            by[str(patient.report["host_id"])].append(patient)
    found = []
    for there in by.values():
        report = there[0].report or {}
        count = len(there)
        slot = max(int(report["slot_bytes"]), Segment.min_slot_bytes(count))
        need = Segment.bytes_for(count, slot) if count > 1 and report["transport"] != "tcp" else 0
        found.append(
            Host(
                there[0].host,
                tuple(patient.name for patient in there),
                str(report["shm_dir"]),
                report["shm_total"],
                report["shm_free"],
                need,
                str(report["shm_trouble"]) if count > 1 else "",
            )
        )
    return sorted(found, key=lambda host: host.name)


def _speed(found: Findings) -> Iterator[Finding]:
    rates = {}
    for pair in found.pairs:
        if pair.way is not None and pair.way.reached and pair.way.seconds:
            rates[pair.source, pair.target] = pair.way.bytes / pair.way.seconds
    if len(rates) < 2:
        return
    usual = statistics.median(rates.values())
    for (source, target), measured in sorted(rates.items()):
        if measured * SLOW < usual and measured < _SLOW_MATTERS:
            one, other = found.patients[source], found.patients[target]
            text = f"{other.name} ({other.host}) sends to {one.name} ({one.host}) at {rate(measured)}"
            hint = f"{text}, others at {rate(usual)}: look at the way between these hosts"
            yield Finding("warning", "pair", (one.name, other.name), hint)
