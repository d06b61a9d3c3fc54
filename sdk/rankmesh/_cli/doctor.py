"""``rankmesh doctor``: finds problems of a job and its hosts."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankmesh._cli import options
from rankmesh._cli.exit_codes import NEGATIVE, OK, CommandError, command, write_json
from rankmesh._cli.options import GatewayOption, JobOption, JsonOption, TokenFileOption, settings
from rankmesh._cli.tables import Table, show
from rankmesh_gateway.humanize import rate, seconds, size

if TYPE_CHECKING:
    from rankmesh._cli.checks import CheckResult, ProbeResults

MIB = 1 << 20
_FIRST_SECONDS = 10.0
"""Least timeout of the first probe of an agent, which loads its web framework at the first request."""


@command
def doctor(
    gateway: GatewayOption = "",
    token_file: TokenFileOption = None,
    job: JobOption = "",
    patience: Annotated[
        float,
        typer.Option(
            "--request-timeout", "--patience", metavar="SECONDS", min=0.1, max=20.0, help="Timeout of a measurement."
        ),
    ] = 3.0,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=1.0, help="Timeout of the whole check.")] = 60.0,
    mib: Annotated[
        int,
        typer.Option(
            metavar="MIB", min=0, max=64, help="MiB (1048576 bytes) to send between each pair of agents; 0: none."
        ),
    ] = 4,
    json: JsonOption = False,
) -> int:
    """Check addresses, ports, clocks, versions, shared memory, and the network path between each pair of agents.

    Exit code 0: there is no problem, at most warnings; 1: there is one; 3: no gateway answers.
    """
    from rankmesh._cli import checks
    from rankmesh_agent.diagnostics.probe import host_report
    from rankmesh_agent.net.deadline import Deadline
    from rankmesh_agent.net.sockets import interfaces

    deadline = Deadline(timeout)
    with contextlib.closing(options.gateway(gateway, token_file, job)) as service:
        addresses = dict(interfaces()) if sys.platform == "linux" else {}
        here = {**vars(host_report(settings(), bool(service.token))), "addresses": addresses}
        try:
            found = checks.ProbeResults(here, checks.probe_gateway(service), *checks.list_agents(service, job))
        except CommandError:
            if not json:
                show([_here(here)])
            raise
    checks.probe_agents(found.agents, service.credential_for, max(patience, _FIRST_SECONDS), deadline)
    found.pairs = checks.probe_pairs(found.agents, service.credential_for, patience, mib * MIB, deadline)
    results = checks.evaluate(found)
    unhealthy = any(each.level == "problem" for each in results)
    if json:
        write_json(_document(found, results, ok=not unhealthy))
    else:
        rows = [[each.level, each.text] for each in results]
        summary = Table("Findings", ["", ""], rows, "nothing wrong")
        show([_here(here), _gateway(found), _agents(found), _memory(found), _pairs(found), summary])
    return NEGATIVE if unhealthy else OK


def _here(here: dict[str, Any]) -> Table:
    rows = [
        ["host", f"{here['host']}, {here['cpus']} processors, Python {here['python']}, RankMesh {here['version']}"],
        ["load", f"{here['load']:.1f} processes for each processor"],
        ["addresses", ", ".join(f"{address} ({name})" for name, address in here["addresses"].items())],
        ["shared memory", here["shm_trouble"] or _room(here["shm_dir"], here["shm_total"], here["shm_free"])],
        ["compiled core", f"does not run: {here['native_trouble']}" if here["native_trouble"] else "runs"],
        ["token", "given" if here["token"] else "none given"],
    ]
    return Table("This host", ["", ""], rows)


def _room(directory: str, total: int | None, free: int | None) -> str:
    if total is None or free is None:
        return f"there is no directory {directory}"
    return f"{directory}: {size(free)} of {size(total)} free"


def _gateway(found: ProbeResults) -> Table:
    gateway = found.gateway
    rows = [[gateway["url"], gateway["version"], seconds(gateway["round_trip"]), _offset(gateway["clock"])]]
    return Table("Gateway", ["url", "version", ">answers in", ">clock"], rows)


def _offset(clock: Any) -> str:
    if clock is None:
        return "?"
    off = 0.0 if abs(clock.offset) < clock.uncertainty else clock.offset
    return f"{off:+.3f} ± {clock.uncertainty:.3f} s"


def _agents(found: ProbeResults) -> Table:
    rows = []
    for agent in found.agents:
        round_trip = agent.way.round_trip if agent.way is not None else None
        answers_in = "?" if round_trip is None else seconds(round_trip)
        version = str((agent.report or {}).get("version", "?"))
        place = [agent.name, agent.host, str(agent.pid), agent.url, agent.state]
        rows.append([*place, answers_in, _offset(agent.clock), version])
    columns = ["agent", "host", ">pid", "url", "state", ">answers in", ">clock", "version"]
    return Table("Agents", columns, rows, "none; 'rankmesh run' starts ranks")


def _memory(found: ProbeResults) -> Table:
    from rankmesh._cli.checks import hosts

    rows = [
        [
            host.name,
            ", ".join(host.names),
            host.trouble or _room(host.directory, host.total, host.free),
            size(host.need) if host.need else "nothing",
        ]
        for host in hosts(found.agents)
    ]
    return Table("Shared memory", ["host", "agents", "room", "another group takes"], rows)


def _pairs(found: ProbeResults) -> Table:
    rows = []
    for pair in found.pairs:
        way = pair.way
        state, connect, round_trip, speed, stage = "not tried", "", "", "", ""
        if way is not None:
            state, stage = "ok" if way.reached else "problem", way.stage
            connect = "" if way.connect is None else seconds(way.connect)
            round_trip = "" if way.round_trip is None else seconds(way.round_trip)
            speed = rate(way.bytes / way.seconds) if way.reached and way.seconds else ""
        rows.append([*pair.names, state, connect, round_trip, speed, pair.carrier, stage])
    columns = ["from", "to", "", ">connects in", ">answers in", ">HTTP", "job uses", ""]
    return Table("Connections, measured over HTTP", columns, rows).without_empty_column()


def _document(found: ProbeResults, results: list[CheckResult], *, ok: bool) -> dict[str, Any]:
    failures: dict[str, list[str]] = {}
    for each in found.problems:
        if each["kind"] == "failed":
            failures.setdefault(each["job"], []).append(each["text"])
    return {
        "ok": ok,
        "time": time.time(),
        "findings": [each._asdict() for each in results],
        "here": found.here,
        "gateway": found.gateway,
        "joining": found.joining,
        "failures": failures,
        "agents": found.agents,
        "pairs": [
            {
                "from": pair.source.name,
                "to": pair.target.name,
                "not_measured": pair.untold,
                "untold": pair.untold,  # its name up to version 0.2
                "job_uses": pair.carrier,
                **(vars(pair.way) if pair.way is not None else {}),
            }
            for pair in found.pairs
        ],
    }
