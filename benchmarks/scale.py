"""What large jobs cost a gateway: ``python -m benchmarks.scale`` prints it. Members are simulated, sockets are real.

Each member has a connection, and sends what the agent of a rank does: its join, then heartbeats, of a rank in two
groups that call collectives, at the interval that the gateway names. A probe asks the gateway 20 times a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import re
import secrets
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Awaitable, Iterable
from contextlib import ExitStack
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from benchmarks.join import processor_seconds
from rankmesh_agent.membership.gateway_client import gateway_health
from rankmesh_agent.membership.heartbeats import HeartbeatChanges
from rankmesh_agent.membership.join import JOINS_A_SECOND
from rankmesh_agent.net.descriptors import raise_limit
from rankmesh_agent.wire.schemas import GroupInfo, Heartbeat, HeartbeatReply, JoinRequest, Member
from rankmesh_gateway.state.job import HeartbeatPace

CASES = ("1x1024", "1x10000", "100x100")
"""Jobs, and ranks of each."""
_HOST_RANKS, _PROBE_SECONDS, _ADDITIONS, _DEADLINE = 8, 0.05, 10_000, 300.0
_KEPT_BYTES = 8 << 10
_COMPLETE = b'{"complete":true'
_TOKEN = secrets.token_hex(16)
"""Without one, the gateway looks for the user of each connection in a table of all of them."""
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


class Cost(NamedTuple):
    """What something took at the gateway.

    Attributes:
        pause: the longest time that the probe waited for an answer.
        addition_ns: processor time of an addition in Python meanwhile: several times as long on a busy machine.
    """

    seconds: float
    processor_seconds: float
    megabytes: float
    pause: float
    resident_mb: float
    addition_ns: float


class Client(asyncio.BufferedProtocol):
    """A member's connection, which throws away what is long: ten thousand tables of members in one process are slow."""

    _buffer = memoryview(bytearray(1 << 20))
    _kept, _missing = b"", 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def post(self, request: bytes) -> bytes:
        """Send a request; return the head of the response, and its body up to some length."""
        self._kept, self.reply = b"", asyncio.get_running_loop().create_future()
        if self.transport.is_closing():
            raise ConnectionError
        self.transport.write(request)
        return await self.reply

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        Rank.traffic += nbytes
        if not self._kept:  # the head comes in one piece
            head = bytes(self._buffer[:nbytes])
            self._missing = head.index(b"\r\n\r\n") + 4 + int(_LENGTH.search(head)[1])  # type: ignore[index]
        self._missing -= nbytes
        self._kept += self._buffer[: min(nbytes, max(0, _KEPT_BYTES - len(self._kept)))]
        if not self._missing and not self.reply.done():
            self.reply.set_result(self._kept)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.reply.done():
            self.reply.set_exception(error or ConnectionError())


class Rank:
    """A simulated member."""

    traffic = 0
    client: Client | None = None

    def __init__(self, job: str, rank: int, world_size: int, url: str) -> None:
        self.job, self.world_size, self.url = job, world_size, urlsplit(url)
        node, port = divmod(rank, _HOST_RANKS)
        address, instance = f"10.{node >> 16}.{node >> 8 & 255}.{node & 255}", secrets.token_hex(16)
        urls = [f"{address}:{4000 + 2 * port}"], f"http://{address}:{4001 + 2 * port}"
        self.member = Member(rank, instance, f"node-{node}", f"{node:016x}", 4000 + rank, *urls, 65536, "auto")
        near = range(node * _HOST_RANKS, min((node + 1) * _HOST_RANKS, world_size))
        self.groups = {"world": list(range(world_size)), f"node-{node}": list(near)}
        self.changes = HeartbeatChanges()

    async def join(self, start: float) -> None:
        await asyncio.sleep(start + random.random() * self.world_size / JOINS_A_SECOND)
        reply = b""
        while not _start(reply).startswith(_COMPLETE):
            reply = await self.post("join", asdict(JoinRequest(self.job, self.world_size, self.member)))
        self.beating = asyncio.create_task(self.heartbeats())

    async def heartbeats(self) -> None:
        interval, seq = HeartbeatPace().add_ranks(self.world_size), 0
        wait = interval * random.random()
        while True:
            await asyncio.sleep(wait)
            seq += 10
            last = "all_reduce(float32[1024], SUM)"
            groups = [GroupInfo(name, name, to, seq, "tcp", last, "", 4096 * seq) for name, to in self.groups.items()]
            beat, again = Heartbeat(self.job, 1, self.world_size, self.member, groups, watches_peers=True), True
            while again:
                reply = HeartbeatReply(**json.loads(await self.post("heartbeat", asdict(self.changes.reduced(beat)))))
                again = self.changes.acknowledge(reply)
            wait, interval = reply.interval * (1.0 if reply.interval == interval else random.random()), reply.interval

    async def connect(self, request: bytes) -> bytes:
        """Connect, and send a request at once, as a process of its own does: the gateway closes who sends nothing."""
        connection = socket.create_connection((self.url.hostname, self.url.port), _DEADLINE)
        connection.sendall(request)
        connection.setblocking(False)
        _, self.client = await asyncio.get_running_loop().create_connection(Client, sock=connection)
        return await self.client.reply

    async def post(self, path: str, document: Any) -> bytes:
        body = json.dumps(document).encode()
        head = (
            f"POST /v1/{path} HTTP/1.1\r\nHost: {self.url.netloc}\r\nAccept-Encoding: gzip\r\n"
            f"Authorization: Bearer {_TOKEN}\r\n"
            f"Content-Length: {len(body)}\r\nContent-Type: application/json\r\n\r\n"
        ).encode()
        Rank.traffic += len(head) + len(body)
        answer = b""
        while not answer:
            try:
                answer = await (self.client.post(head + body) if self.client else self.connect(head + body))
            except OSError:
                self.client = None  # it was idle, and has been closed
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the gateway answered {answer!r}")
        return answer.partition(b"\r\n\r\n")[2]


def _start(reply: bytes) -> bytes:
    """Return the start of a reply's text, which may be compressed."""
    return zlib.decompressobj(wbits=31).decompress(reply, 32) if reply.startswith(b"\x1f\x8b") else reply


def measure(jobs: int, ranks: int, seconds: float) -> dict[str, Cost]:
    """Return the cost of the joins of jobs, and of their heartbeats for some seconds."""
    with ExitStack() as stack:
        command = [sys.executable, "-m", "rankmesh_gateway", "--port=0"]
        environment = os.environ | {"RANKMESH_TOKEN": _TOKEN}
        gateway = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        stack.callback(gateway.kill)
        assert gateway.stdout is not None
        url = gateway.stdout.readline().split()[-1]
        ours, theirs = multiprocessing.Pipe()
        prober = multiprocessing.Process(target=_probe, args=(url, theirs), daemon=True)
        prober.start()
        stack.callback(prober.kill)
        members = [Rank(f"job-{job}", rank, ranks, url) for job in range(jobs) for rank in range(ranks)]
        status = Path(f"/proc/{gateway.pid}/status")
        found = {}

        async def take(name: str, work: Iterable[Awaitable[None]]) -> None:
            ours.send(None)
            ours.recv()
            began, used, Rank.traffic = time.monotonic(), processor_seconds(gateway.pid), 0
            await asyncio.wait_for(asyncio.gather(*work), _DEADLINE)
            took, used = time.monotonic() - began, processor_seconds(gateway.pid) - used
            ours.send(None)
            resident = int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) / 1e3  # type: ignore[index]
            pause, addition_ns = ours.recv()
            found[name] = Cost(took, used, Rank.traffic / 1e6, pause, resident, addition_ns)

        async def run() -> None:
            # The jobs start one after the other, and the ranks of each as their agents spread them.
            starts = (index // ranks * ranks / JOINS_A_SECOND for index in range(len(members)))
            await take("join", [member.join(start) for member, start in zip(members, starts, strict=True)])
            await asyncio.sleep(2 * HeartbeatPace().add_ranks(len(members)))  # until all know the interval
            await take("heartbeats", [asyncio.sleep(seconds)])

        asyncio.run(run())
        return found


def _probe(url: str, parent: Connection) -> None:
    """Ask the gateway again and again; at each message, send the longest time since the last one."""
    longest, additions = 0.0, [0.0]
    while True:
        if parent.poll(_PROBE_SECONDS):
            parent.recv()
            parent.send((longest, median(additions) / _ADDITIONS * 1e9))
            longest, additions = 0.0, []
        began = time.monotonic()
        gateway_health(url, _DEADLINE)
        longest = max(longest, time.monotonic() - began)
        used = time.process_time()
        sum(number + number for number in range(_ADDITIONS))
        additions.append(time.process_time() - used)


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("cases", nargs="*", default=CASES, metavar="JOBSxRANKS")
    parser.add_argument("--seconds", type=float, default=30.0, help="of heartbeats")
    options = parser.parse_args()
    raise_limit()
    columns = {"seconds": 9, "CPU s": 8, "core": 6, "MB": 8, "MB/s": 7, "pause s": 9, "RSS MB": 8, "+ ns": 6}
    print("jobs x ranks".ljust(24) + "".join(name.rjust(width) for name, width in columns.items()))
    for case in options.cases:
        jobs, ranks = map(int, case.split("x"))
        for name, cost in measure(jobs, ranks, options.seconds).items():
            took, used, sent, pause, resident, addition = cost
            print(
                f"{case} {name:{23 - len(case)}}{took:9.2f}{used:8.2f}{used / took:6.2f}{sent:8.1f}{sent / took:7.2f}"
                f"{pause:9.3f}{resident:8.0f}{addition:6.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
