"""Clients that are slow, silent or many take from a job neither its descriptors nor its steps, nor keep others out."""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.attached import TOKEN, offer
from support.connecting import dial
from support.hosting import embedded_only
from support.processes import DEADLINE, Me, Rank, Ranks, wait_until

import rankmesh as dist
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.diagnostics import snapshot
from rankmesh_agent.net.admission import UNAUTHENTICATED
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.net.upgrade import connect_upgraded
from rankmesh_agent.remote.client import AgentDialer
from rankmesh_agent.standalone import Standalone
from rankmesh_agent.store.client import StoreClient
from rankmesh_agent.store.commands import Set
from rankmesh_agent.transports.tcp import TcpTransport
from rankmesh_agent.wire import attach_frames, store_frames
from rankmesh_agent.wire.errors import DistNetworkError

DESCRIPTORS = 256
RESERVE = 64
"""Descriptors that the training code opens in each step."""
SILENT, OTHERS = 1000, 300
"""Numbers of clients that send nothing, and of others: more than the descriptors."""
_HOST = b"Host: 127.0.0.1\r\n"
SENT = {
    "half a head": b"GET /livez HTTP/1.1\r\n" + _HOST,
    "a request, then nothing": b"GET /livez HTTP/1.1\r\n" + _HOST + b"\r\n",
    "a wrong token": b"GET /v1/store HTTP/1.1\r\n" + _HOST + b"Authorization: Bearer guess\r\n\r\n",
    "an upgrade to the store": store_frames.UPGRADE.request("127.0.0.1"),
    "an upgrade to snapshots": snapshot.UPGRADE.request("127.0.0.1"),
}
BODY = b"PUT /v1/store/key HTTP/1.1\r\n" + _HOST + b"Content-Length: 100\r\n\r\n"


def train(me: Me) -> None:
    """Average gradients until told to stop, with as many files open as the descriptors allow."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    me.init()
    gradient, end, steps = np.ones(1000), np.zeros(1), 0
    while not end[0]:
        with contextlib.ExitStack() as opened:
            for _ in range(RESERVE):
                opened.enter_context(Path("/dev/null").open())
            dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
        end[0] = (me.folder / "stop").exists()
        dist.all_reduce(end, op=dist.ReduceOp.MAX)
        steps += 1
        me.report(steps=steps)
    dist.destroy_process_group()


def listening_ports(pid: int) -> list[int]:
    """Return the TCP ports on which a process listens."""
    targets = []
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # it is closed by now
            targets.append(os.readlink(entry.path))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = {f"socket:[{row[9]}]": int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}
    return [listening[target] for target in targets if target in listening]


def is_http(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE)
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/livez")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False


@contextlib.contextmanager
def many(clients: int, port: int, data: bytes) -> Iterator[None]:
    """Hold connections to a port, of clients that have sent something, the last byte by itself."""
    with contextlib.ExitStack() as held:
        socks = [held.enter_context(socket.create_connection(("127.0.0.1", port), DEADLINE)) for _ in range(clients)]
        for part in filter(None, (data[:-1], data[-1:])):
            for sock in socks:
                with contextlib.suppress(ConnectionError):
                    sock.sendall(part)
        yield


@embedded_only("an attached process has no servers")
@pytest.mark.processes
@pytest.mark.parametrize("token", [TOKEN, ""], ids=["token", "no token"])
def test_a_job_trains_on_and_serves_others_whatever_clients_do_not_send(ranks: Ranks, token: str) -> None:
    environment = {"RANKMESH_TOKEN": token, "RANKMESH_TRANSPORT": "tcp", "RANKMESH_FULL_MESH": "0"}
    started = ranks.start(train, 4, env=environment)
    victim = started[0]
    wait_until(lambda: "steps" in victim.reported or victim.code is not None, "the first step")
    assert victim.code is None, ranks.transcript()
    ports = listening_ports(victim.pid)
    http_ports = [port for port in ports if is_http(port)]
    (mesh_port,) = set(ports) - set(http_ports)
    store_port = next(port for port in http_ports if has_store(port, token))
    attacks = [(SILENT, port, b"") for port in ports]
    attacks += [(OTHERS, store_port, data) for data in (SENT.values() if token else [BODY])]
    for attack in attacks:
        with many(*attack):
            assert is_http(store_port)
            assert has_store(store_port, token)
            wait_until(lambda: is_answered(mesh_port, token), "an answer of the rank")
            check_it_trains(victim, ranks)
    ranks.mark("stop")
    ranks.wait(started, to_succeed=True)
    assert not any(rank.code for rank in started), ranks.transcript()
    assert "the last one from 127.0.0.1" in victim.stderr
    assert len(victim.stderr.splitlines()) < 10, victim.stderr


def has_store(port: int, token: str) -> bool:
    """Return whether a new client gets in at the job's store there."""
    with contextlib.closing(StoreClient(f"http://127.0.0.1:{port}", token)) as store:
        try:
            store.execute(Set("key", b"value"))
        except DistNetworkError:
            return False
        return True


def is_answered(mesh_port: int, token: str) -> bool:
    """Return whether a rank has let a client prove that it knows the token; it waits for no more ranks."""
    with pytest.raises(DistNetworkError) as caught:
        dial(TcpTransport(token), f"127.0.0.1:{mesh_port}")
    return "does not wait for this rank" in str(caught.value)


def check_it_trains(victim: Rank, ranks: Ranks) -> None:
    """Check that a rank makes steps, and that its descriptors do not go to its clients."""
    before = victim.reported["steps"]
    wait_until(lambda: victim.reported["steps"] > before + 2 or victim.code is not None, "steps")
    assert victim.code is None, ranks.transcript()
    assert len(os.listdir(f"/proc/{victim.pid}/fd")) < DESCRIPTORS - RESERVE


def test_silent_clients_keep_no_process_from_attaching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UNAUTHENTICATED, "_most", DESCRIPTORS // 8)
    agent = Standalone(Settings(token=TOKEN), lambda: "http://127.0.0.1:9", host="127.0.0.1", name="agent")
    agent.start()
    with contextlib.closing(agent), contextlib.ExitStack() as held:
        for _ in range(SILENT):
            held.enter_context(
                connect_upgraded(agent.urls[0], attach_frames.UPGRADE, connect_seconds=DEADLINE, seconds=DEADLINE)[0]
            )
        assert len(UNAUTHENTICATED) <= DESCRIPTORS // 8
        AgentDialer(offer(agent), "", TOKEN).connect(Deadline(DEADLINE)).close()
