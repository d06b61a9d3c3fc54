"""Clients that are slow, silent or many take from a job neither its descriptors nor its steps, nor keep others out."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import multiprocessing
import os
import resource
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.attached import TOKEN, offer
from support.connecting import dial
from support.hosting import embedded_only
from support.processes import DEADLINE, Me, Ranks, wait_until

import rankmesh as dist
from benchmarks.attackers import KINDS, Kind, attack, listening_ports, server_seconds, speaks_http
from rankmesh._session.session import require_session
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.http.middleware import UNAUTHENTICATED_A_SECOND
from rankmesh_agent.net.admission import ConnectionLimit
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.remote.client import AgentDialer
from rankmesh_agent.standalone import Standalone
from rankmesh_agent.store.client import StoreClient
from rankmesh_agent.store.commands import Set
from rankmesh_agent.transports.tcp import TcpTransport
from rankmesh_agent.wire.credentials import for_job
from rankmesh_agent.wire.errors import DistNetworkError
from rankmesh_agent.wire.hello import Service, preface

DESCRIPTORS = 256
RESERVE = 64
"""Descriptors that the training code opens in each step."""
CLIENTS = 300
"""Number of clients of an attack: more than the descriptors."""
CLIENTS_A_WINDOW = 30
"""Clients that come while the processor time of the rank's servers is measured."""
MOST_SECONDS = 0.2 / UNAUTHENTICATED_A_SECOND
"""Processor time of a rank's servers for a client: as many as may ask in a second take a fifth of a core together."""
BODY = b"PUT /v1/store/key HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n"
SENT = [kind.data for kind in KINDS.values() if kind.http_only]


def train(me: Me) -> None:
    """Average gradients until told to stop, with as many files open as the descriptors allow."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    me.init()
    agent: Any = require_session().agent
    me.report(gateway=agent.info().gateway, store=agent.store.id)
    (me.folder / f"steps-{me.rank}").write_bytes(bytes(8))
    with (me.folder / f"steps-{me.rank}").open("r+b") as file:
        steps = memoryview(mmap.mmap(file.fileno(), 8)).cast("Q")
    gradient, end = np.ones(1000), np.zeros(1)
    while not end[0]:
        with contextlib.ExitStack() as opened:
            for _ in range(RESERVE):
                opened.enter_context(Path("/dev/null").open())
            dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
        end[0] = (me.folder / "stop").exists()
        dist.all_reduce(end, op=dist.ReduceOp.MAX)
        steps[0] += 1
    dist.destroy_process_group()


@contextlib.contextmanager
def many(clients: int, ports: Sequence[int], sent: Sequence[bytes]) -> Iterator[None]:
    """Hold connections to each port of clients that have sent something in turn, the last byte by itself."""
    with contextlib.ExitStack() as held:
        socks = [
            (held.enter_context(socket.create_connection(("127.0.0.1", port), DEADLINE)), data)
            for port, data in itertools.islice(zip(itertools.cycle(ports), itertools.cycle(sent)), clients)
        ]
        for begin, end in ((None, -1), (-1, None)):
            for sock, data in socks:
                with contextlib.suppress(ConnectionError):
                    sock.sendall(data[begin:end])
        yield


class Victim:
    """Rank 0 of a job that trains: of six ranks, some of which do not connect to each other until they must.

    Attributes:
        pid: its process.
        ports, http_ports, mesh_port: its ports, and that of the gateway that it has started.
    """

    def __init__(self, ranks: Ranks, token: str) -> None:
        environment = {"RANKMESH_TOKEN": token, "RANKMESH_TRANSPORT": "tcp", "RANKMESH_FULL_MESH": "0"}
        self.token, self.job = token, ranks.job
        self._ranks = ranks
        self._started = ranks.start(train, 6, env=environment)
        self.rank = self._started[0]
        self.pid = self.rank.pid
        wait_until(lambda: self.steps() > 0 or self.rank.code is not None, "the first step")
        assert self.rank.code is None, ranks.transcript()
        self._gateway = self.rank.reported["gateway"]
        self.ports = [*listening_ports(self.pid), int(self._gateway.rpartition(":")[2])]
        self.http_ports = [port for port in self.ports if speaks_http(port, DEADLINE)]
        (self.mesh_port,) = set(self.ports) - set(self.http_ports)

    def steps(self) -> int:
        """Return the number of steps so far."""
        file = self._ranks.folder / "steps-0"
        return int.from_bytes(file.read_bytes(), sys.byteorder) if file.exists() else 0

    def descriptors(self) -> int:
        """Return the number of its descriptors, without those of the training code."""
        opened = []
        for each in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                opened.append(each.readlink())
        return len(opened) - opened.count(Path(os.devnull))

    def check(self) -> None:
        """Check that it serves clients with the token, makes steps, and its descriptors do not go to its clients."""
        before = self.steps()
        assert all(speaks_http(port, DEADLINE) for port in self.http_ports)
        token = for_job(self.token, self.job) if self.token else ""
        with contextlib.closing(StoreClient(self._gateway, token, bytes.fromhex(self.rank.reported["store"]))) as store:
            store.execute(Set("key", b"value"))
        wait_until(lambda: is_answered(self.mesh_port, for_job(self.token, self.job)), "an answer of the rank")
        wait_until(lambda: self.steps() > before + 2 or self.rank.code is not None, "steps")
        assert self.rank.code is None, self._ranks.transcript()
        assert self.descriptors() < DESCRIPTORS - RESERVE

    def end(self) -> None:
        """End the job, and check that no rank has failed, and the log says little."""
        self._ranks.mark("stop")
        self._ranks.wait(self._started, to_succeed=True)
        assert len(self.rank.stderr.splitlines()) < 10, self.rank.stderr


@embedded_only("an attached process has no servers")
@pytest.mark.processes
def test_a_job_trains_on_and_serves_others_whatever_clients_do(ranks: Ranks) -> None:
    victim = Victim(ranks, TOKEN)
    for ports, sent in ((victim.ports, [b""]), (victim.http_ports, SENT)):
        with many(CLIENTS, ports, sent):
            victim.check()
    for kind in KINDS.values():
        with flood(kind, victim.http_ports if kind.http_only else victim.ports) as made:
            victim.check()
            assert any(cost(victim.pid, made) < MOST_SECONDS for _ in range(5)), kind
    victim.end()
    assert "the last one from 127.0.0.1" in victim.rank.stderr


@embedded_only("an attached process has no servers")
@pytest.mark.processes
def test_so_does_a_job_without_a_token(ranks: Ranks) -> None:
    victim = Victim(ranks, "")
    with many(CLIENTS, victim.http_ports, [b"", BODY]):
        victim.check()
    victim.end()


def cost(pid: int, made: Any) -> float:
    """Return the processor seconds that a client costs a rank's servers; more where other programs slow all down."""
    used, before = server_seconds(pid), made.value
    wait_until(lambda: made.value >= before + CLIENTS_A_WINDOW, "clients")
    return (server_seconds(pid) - used) / (made.value - before)


@contextlib.contextmanager
def flood(kind: Kind, ports: Sequence[int]) -> Iterator[Any]:
    """Let clients come and go all the time; yields their number, as ``value``."""
    context = multiprocessing.get_context("fork")
    over, made = context.Event(), context.RawValue("Q")
    clients = context.Process(target=attack, args=(kind, ports, over.is_set), kwargs={"made": made}, daemon=True)
    clients.start()
    yield made
    over.set()
    clients.join(DEADLINE)


def is_answered(mesh_port: int, token: str) -> bool:
    """Return whether a rank has let a client prove that it knows the token; it waits for no more ranks."""
    with pytest.raises(DistNetworkError) as caught:
        dial(TcpTransport(token), f"127.0.0.1:{mesh_port}")
    return "does not wait for this rank" in str(caught.value)


def test_silent_clients_keep_no_process_from_attaching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConnectionLimit, "size", DESCRIPTORS // 8)
    agent = Standalone(Settings(token=TOKEN), lambda: "http://127.0.0.1:9", host="127.0.0.1", name="agent")
    agent.start()
    with contextlib.closing(agent), contextlib.ExitStack() as held:
        for _ in range(CLIENTS):
            sock = held.enter_context(socket.create_connection(("127.0.0.1", agent._http.port), DEADLINE))
            sock.sendall(preface(Service.ATTACH))
        assert len(agent._http._acceptor._limit.waiting) <= DESCRIPTORS // 8
        AgentDialer(offer(agent), "", "job", for_job(TOKEN, "job")).connect(Deadline(DEADLINE)).close()
