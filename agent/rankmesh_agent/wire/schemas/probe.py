"""Bodies of host reports and network probes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rankmesh_agent.wire.fields import Body, Integer

MAX_PROBE_BYTES = 64 << 20
MAX_PROBE_SECONDS = 20.0


@dataclass
class HostReport:
    """Properties of an agent's host, as the agent's process sees it.

    Attributes:
        host, host_id: see Member.
        time: seconds since 1970, by the host's clock.
        version: RankMesh's version.
        python: Python's version.
        kernel: the operating system and its version.
        cpus: processors that the process may use.
        transport: value of RANKMESH_TRANSPORT: ``auto``, ``tcp`` or ``shm``.
        shm_dir: directory of shared memory files.
        shm_total, shm_free: bytes of that file system, and free ones; None if the directory does not exist.
        shm_trouble: reason why processes cannot share memory there, empty if they can.
        slot_bytes: bytes of one rank's slot in a group's shared memory.
        native_trouble: reason why the compiled core does not run, empty if it does.
        token: whether the agent requires a token.
        load: processes that run or wait for a processor, for each processor of the host: the last minute's mean.
    """

    host: str
    host_id: str
    time: float
    version: str
    python: str
    kernel: str
    cpus: Integer
    transport: str
    shm_dir: str
    shm_total: Integer | None
    shm_free: Integer | None
    shm_trouble: str
    slot_bytes: Integer
    native_trouble: str
    token: bool
    load: float


@dataclass
class ProbeRequest(Body):
    """Ask an agent to measure its network path to another one.

    Attributes:
        url: the other agent's base URL, one of those that the gateway lists.
        bytes: bytes to fetch from there, cut to MAX_PROBE_BYTES; 0 measures only the round-trip time.
        seconds: maximum duration, cut to MAX_PROBE_SECONDS.
    """

    url: str
    bytes: Integer = 0
    seconds: float = 5.0


ProbeStage = Literal["", "name", "refused", "route", "connect", "answer", "token", "stranger", "transfer"]
"""Stage at which a probe failed: the host's name, the connection, the first response, the bytes; empty if none did."""


@dataclass
class ProbeReply:
    """The path from one agent to another, by HTTP over a separate TCP connection, not one of the data plane.

    Attributes:
        url: the other agent's base URL.
        reached: whether all stages succeeded.
        stage: the stage that failed.
        error: reason of the failure, a sentence; empty after success.
        connect: seconds to connect, one round trip of packets; None without a connection.
        round_trip: seconds from a request to its response, the minimum of several.
        bytes: number of fetched bytes.
        seconds: duration of the fetch, without the round trip.
    """

    url: str
    reached: bool
    stage: ProbeStage = ""
    error: str = ""
    connect: float | None = None
    round_trip: float | None = None
    bytes: Integer = 0
    seconds: float | None = None
