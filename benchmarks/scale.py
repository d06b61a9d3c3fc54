"""Cost of large jobs at one gateway: ``python -m benchmarks.scale``. Members are simulated, the sockets are real.

Every member has a connection of its own, and sends what the agent of a rank does: its join, then heartbeats at the
interval that the gateway names, each after some calls in its two groups. A probe asks the gateway 20 times a second.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import multiprocessing
import random
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from benchmarks.join import processor_seconds
from rankmesh_agent.membership.gateway_client import JOINS_A_SECOND, gateway_id
from rankmesh_agent.membership.heartbeat_changes import HeartbeatChanges
from rankmesh_agent.net.descriptors import raise_limit
from rankmesh_agent.wire.schemas import GroupInfo, Heartbeat, HeartbeatReply, JoinRequest, Member

CASES = ((1, 1024), (1, 10_000), (100, 100))
"""Jobs, and ranks of each."""
_HOST_RANKS, _PROBE_SECONDS = 8, 0.05
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


class Figures(NamedTuple):
    """What a part of a case took at the gateway."""

    seconds: float
    processor_seconds: float
    bytes: int
    pause: float
    resident: int


class Rank:
    """A simulated member."""

    traffic = 0

    def __init__(self, job: str, rank: int, world_size: int, url: str) -> None:
        node, first = rank // _HOST_RANKS, rank // _HOST_RANKS * _HOST_RANKS
        address, instance = f"10.{node >> 16}.{node >> 8 & 255}.{node & 255}", secrets.token_hex(16)
        urls = [f"{address}:{32768 + rank % 28000}"], f"http://{address}:{32768 + rank * 7 % 28000}"
        self.member = Member(rank, instance, f"node-{node:05}", f"{node:016x}", 4000 + rank, *urls, 65536, "auto")
        self.job, self.world_size, self.url = job, world_size, urlsplit(url)
        self.groups = {"world": list(range(world_size)), "host": list(range(first, min(first + _HOST_RANKS, world_size)))}
        self.changes = HeartbeatChanges()

    async def join(self) -> None:
        await asyncio.sleep(random.random() * self.world_size / JOINS_A_SECOND)
        self.reader, self.writer = await asyncio.open_connection(self.url.hostname, self.url.port)
        request, complete = asdict(JoinRequest(self.job, self.world_size, self.member)), False
        while not complete:
            content = await self.post("join", request)
            if len(content) < 100_000 or self.member.rank == 0:  # the time of all members' tables is not the gateway's
                reply = json.loads(content)
                complete, self.interval = reply["complete"], reply["interval"]
            else:
                complete, self.interval = True, 1.0

    async def heartbeats(self, seconds: float) -> None:
        clock = asyncio.get_running_loop().time
        end, seq, wait = clock() + seconds, 0, self.interval * random.random()
        while clock() + wait < end:
            await asyncio.sleep(wait)
            seq += 10
            groups = [
                GroupInfo(name, name, ranks, seq, "tcp", "all_reduce(float32[1024], SUM)", "", seq * 4096)
                for name, ranks in self.groups.items()
            ]
            beat = Heartbeat(self.job, 1, self.world_size, self.member, groups, watches_peers=True)
            again = True
            while again:
                reply = HeartbeatReply(**json.loads(await self.post("heartbeat", asdict(self.changes.reduced(beat)))))
                again = self.changes.acknowledge(reply)
            wait, self.interval = reply.interval * (1 if reply.interval == self.interval else random.random()), reply.interval

    async def post(self, path: str, document: Any) -> bytes:
        body = json.dumps(document).encode()
        head = (
            f"POST /v1/{path} HTTP/1.1\r\nHost: {self.url.netloc}\r\nAccept-Encoding: gzip\r\n"
            f"Content-Length: {len(body)}\r\nContent-Type: application/json\r\n\r\n"
        ).encode()
        while True:
            try:
                self.writer.write(head + body)
                answer = await self.reader.readuntil(b"\r\n\r\n")
                break
            except (OSError, EOFError):  # an idle connection has been closed
                self.reader, self.writer = await asyncio.open_connection(self.url.hostname, self.url.port)
        assert answer.startswith(b"HTTP/1.1 200"), answer
        content = await self.reader.readexactly(int(_LENGTH.search(answer)[1]))
        Rank.traffic += len(head) + len(body) + len(answer) + len(content)
        return gzip.decompress(content) if b"gzip" in answer else content


def measure(jobs: int, ranks: int, seconds: float) -> dict[str, Figures]:
    """Return the figures of the join of jobs, and of their heartbeats."""
    with ExitStack() as stack:
        gateway = subprocess.Popen(
            [sys.executable, "-m", "rankmesh_gateway", "--port", "0"], stdout=subprocess.PIPE, text=True
        )
        stack.callback(gateway.wait)
        stack.callback(gateway.kill)
        assert gateway.stdout is not None
        url = gateway.stdout.readline().split()[-1]
        receiver, sender = multiprocessing.Pipe()
        prober = multiprocessing.Process(target=probe, args=(url, sender), daemon=True)
        prober.start()
        stack.callback(prober.kill)
        receiver.send(None)
        receiver.recv()
        members = [Rank(f"job-{job}", rank, ranks, url) for job in range(jobs) for rank in range(ranks)]
        found: dict[str, Figures] = {}

        async def part(name: str, work: Sequence[Any]) -> None:
            began, used, Rank.traffic = time.monotonic(), processor_seconds(gateway.pid), 0
            await asyncio.gather(*work)
            taken = time.monotonic() - began
            used = processor_seconds(gateway.pid) - used
            receiver.send(None)
            found[name] = Figures(taken, used, Rank.traffic, receiver.recv(), peak(gateway.pid))

        async def run() -> None:
            await part("join", [each.join() for each in members])
            await part("heartbeats", [each.heartbeats(seconds) for each in members])

        asyncio.run(run())
        return found


def probe(url: str, parent: Connection) -> None:
    """Ask the gateway again and again; on a message, send the longest time that an answer took."""
    longest = 0.0
    while True:
        if parent.poll(_PROBE_SECONDS):
            parent.recv()
            parent.send(longest)
            longest = 0.0
        began = time.monotonic()
        gateway_id(url, 600.0)
        longest = max(longest, time.monotonic() - began)


def peak(pid: int) -> int:
    """Return the most resident memory that a process had, in bytes."""
    return 1024 * int(re.search(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.M)[1])  # type: ignore[index]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--cases", nargs="+", default=[f"{jobs}x{ranks}" for jobs, ranks in CASES])
    parser.add_argument("--seconds", type=float, default=30.0, help="of heartbeats")
    options = parser.parse_args()
    raise_limit()
    for case in options.cases:
        jobs, ranks = map(int, case.split("x"))
        for name, one in measure(jobs, ranks, options.seconds).items():
            print(
                f"{jobs} x {ranks} {name:10}: {one.seconds:6.2f} s, processor {one.processor_seconds:7.2f} s "
                f"({one.processor_seconds / one.seconds:.2f} core), {one.bytes / 1e6:8.1f} MB ({one.bytes / one.seconds / 1e6:.2f} MB/s), longest pause {one.pause:.3f} s, "
                f"RSS {one.resident / 1e6:.0f} MB",
                flush=True,
            )
