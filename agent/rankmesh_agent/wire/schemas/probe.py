"""Bodies of host reports and network probes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rankmesh_agent.wire.fields import Integer, Number

MAX_PROBE_BYTES = 64 << 20
"""The most bytes that a probe fetches."""
MAX_PROBE_SECONDS = 20.0
"""The longest that a probe takes."""


@dataclass
class HostReport:
    """What an agent's host has, as the agent's process sees it.

    Attributes:
        host: host name.
        host_id: equal for processes that can share memory, different otherwise.
        time: seconds since 1970, by the host's clock.
        version: RankMesh's version.
        python: Python's version.
        kernel: the operating system and its version.
        cpus: processors the process may use.
        transport: what RANKMESH_TRANSPORT says: ``auto``, ``tcp`` or ``shm``.
        shm_dir: where shared memory is made.
        shm_total: bytes of that file system, None if there is no such directory.
        shm_free: bytes of it that are free.
        shm_trouble: why memory cannot be shared there, empty if it can.
        slot_bytes: bytes of one rank's slot in a group's shared memory.
        token: whether a token is asked for.
    """

    host: str
    host_id: str
    time: Number
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
    token: bool


@dataclass
class ProbeRequest:
    """Ask an agent to measure its way to another one.

    Attributes:
        url: the other's base URL, one of those that the gateway lists.
        bytes: how many to fetch from there, cut to MAX_PROBE_BYTES; 0 measures only how long a question takes.
        seconds: how long it may take, cut to MAX_PROBE_SECONDS.
    """

    url: str
    bytes: Integer = 0
    seconds: Number = 5.0


ProbeStage = Literal["", "name", "refused", "route", "connect", "answer", "token", "stranger", "transfer"]
"""Where a probe came to its end: the host's name, connecting, the first answer, the bytes; empty if it did not."""


@dataclass
class ProbeReply:
    """The way from one agent to another, by HTTP over a TCP connection of its own: not the data plane's.

    Attributes:
        url: the other's base URL.
        reached: whether all went well.
        stage: where it did not.
        error: why not, in a sentence; empty if it did.
        connect: seconds to connect: one round trip of packets; None if that did not happen.
        round_trip: seconds from a question to its answer, the least of several.
        bytes: how many were fetched.
        seconds: how long they took, without the round trip.
    """

    url: str
    reached: bool
    stage: ProbeStage = ""
    error: str = ""
    connect: Number | None = None
    round_trip: Number | None = None
    bytes: Integer = 0
    seconds: Number | None = None
