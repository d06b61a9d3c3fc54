"""Cost of large jobs at one gateway: ``python -m benchmarks.scale``. Members are simulated, the sockets are real.

Every member has a connection of its own, and sends what the agent of a rank does: its join, then heartbeats at the
interval that the gateway names, each after some calls in its two groups. A probe asks the gateway 20 times a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import re
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
from rankmesh_agent.membership.gateway_client import gateway_id
from rankmesh_agent.net.descriptors import raise_limit
from rankmesh_agent.wire.schemas import GroupInfo, Heartbeat, JoinRequest, Member

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
        host = f"node-{rank // _HOST_RANKS:05}"
        address = f"10.{rank >> 16}.{rank // _HOST_RANKS >> 5 & 255}.{rank // _HOST_RANKS & 31}"
        self.member = Member(
            rank,
            f"{rank:032x}",
            host,
            f"{host}-id",
            4000 + rank,
            [f"{address}:4711"],
            f"http://{address}:4712",
            65536,
            "auto",
        )
        self.job, self.world_size, self.url = job, world_size, urlsplit(url)

    async def join(self) -> None:
        self.reader, self.writer = await asyncio.open_connection(self.url.hostname, self.url.port)
        request, wait = JoinRequest(self.job, self.world_size, self.member), 0.0
        while True:
            reply = await self.post("join", {**asdict(request), "wait": wait})
            if b'"complete": true' in reply[:40]:
                self.epoch = 1
                return
            wait = 20.0

    async def heartbeats(self, seconds: float) -> None:
        end = asyncio.get_running_loop().time() + seconds
        near = range(self.member.rank // 8 * 8, min(self.member.rank // 8 * 8 + 8, self.world_size))
        seq = 0
        interval = 1.0
        await asyncio.sleep(interval * self.member.rank / self.world_size)
        while asyncio.get_running_loop().time() < end:
            seq += 10
            groups = [
                GroupInfo(
                    f"{i:016x}", f"group-{i}", list(ranks), seq, "tcp", "all_reduce(float32[1024], SUM)", "", seq * 4096
                )
                for i, ranks in enumerate((range(self.world_size), near))
            ]
            await self.post("heartbeat", asdict(Heartbeat(self.job, 1, self.world_size, self.member, groups, [], True)))
            await asyncio.sleep(interval)

    async def post(self, path: str, document: Any) -> bytes:
        body = json.dumps(document).encode()
        head = (
            f"POST /v1/{path} HTTP/1.1\r\nHost: {self.url.netloc}\r\nAccept-Encoding: identity\r\n"
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
        return content


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
