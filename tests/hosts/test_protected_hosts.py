"""Between hosts connections are encrypted, with certificates of the token or of files; within a host they are not."""

from __future__ import annotations

import json

import pytest
from support.certificates import tls_of
from support.host_commands import Hosts, Started
from support.me import wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.processes]

SCRIPT = """
import gc, json
import numpy as np
import rankmesh as dist
from rankmesh_agent.net.tls_socket import TlsSocket
from rankmesh_agent.store.client_connection import ClientConnection

def protection(sock):
    return "TLS" if isinstance(sock, TlsSocket) else "none"

dist.init_process_group()
array = np.ones(1 << 20, np.float32)
dist.all_reduce(array)
assert (array == dist.get_world_size()).all()
store = dist._get_default_store()
assert store.add("arrived", 1) <= 3
store.wait(["arrived"])
engine = dist.group.WORLD._communicator.engine
found = {peer: protection(getattr(each.connection, "socket", None)) for peer, each in engine._peers.items()}
clients = [each for each in gc.get_objects() if isinstance(each, ClientConnection) and each.name]
found["store"] = "/".join(sorted({protection(each.sock) for each in clients}))
dist.barrier()
print(json.dumps(found), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("certificates", ["token", "files"])
def test_what_leaves_a_host_is_encrypted(hosts: Hosts, tmp_path, certificates, transport):
    (hosts.folder / "train_once.py").write_text(SCRIPT)
    started = []
    for rank, host in enumerate(["host1", "host1", "host2"]):
        secured = tls_of(tmp_path / "of-hosts", f"{host},{hosts.addresses[host]}") if certificates == "files" else {}
        started.append(
            hosts.start(
                host,
                "python train_once.py",
                RANK=str(rank),
                WORLD_SIZE="3",
                MASTER_ADDR="host1",
                MASTER_PORT="29500",
                RANKMESH_TOKEN="the secret of both hosts",
                RANKMESH_BIND=hosts.addresses[host],
                RANKMESH_TRANSPORT=transport,
                **secured,
            )
        )
    assert [each.wait() for each in started] == [0, 0, 0], hosts.transcript()
    found = [json.loads(each.output.splitlines()[-1]) for each in started]
    assert found == [
        {"1": "none", "2": "TLS", "store": "none"},  # the gateway is on the same host
        {"0": "none", "2": "TLS", "store": "none"},
        {"0": "TLS", "1": "TLS", "store": "TLS"},
    ]


ATTACHED = """
import gc, json
import numpy as np
import rankmesh as dist
from rankmesh_agent.net.stream import FramedStream
from rankmesh_agent.net.tls_socket import TlsSocket

dist.init_process_group(timeout=60)
array = np.arange(1 << 20, dtype=np.float32)
dist.all_reduce(array)
assert (array == np.arange(1 << 20)).all()
dist._get_default_store().set("key", "value")
streams = [each for each in gc.get_objects() if isinstance(each, FramedStream)]
assert len(streams) >= 2
print(json.dumps([isinstance(each.sock, TlsSocket) for each in streams]))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("certificates", ["token", "files"])
def test_a_process_that_attaches_from_another_host_uses_tls(hosts: Hosts, tmp_path, certificates):
    """The agent is on host1, with the gateway, and its process on host2: so the calls cross the network."""
    (hosts.folder / "attached.py").write_text(ATTACHED)
    scheme = "https" if certificates == "files" else "http"

    def variables(host: str) -> dict[str, str]:
        secured = tls_of(tmp_path / "of-hosts", f"{host},{hosts.addresses[host]}") if certificates == "files" else {}
        return {"RANKMESH_TOKEN": "the secret of both hosts", **secured}

    here = hosts.addresses["host1"]
    gateway = f"{scheme}://{here}:8700"
    commands = [f"rankmesh gateway --host {here}", f"rankmesh agent --host {here} --gateway {gateway}"]
    services = []
    for port, command in enumerate(commands, 8700):
        services.append(hosts.start("host1", f"exec {command}", **variables("host1")))
        services[-1].wait_for(str(port))
    attached = hosts.start(
        "host2",
        "python attached.py",
        RANK="0",
        WORLD_SIZE="1",
        RANKMESH_GATEWAY=gateway,
        RANKMESH_HOSTING="attached",
        **variables("host2"),
    )
    assert attached.wait() == 0, hosts.transcript()
    assert set(json.loads(attached.output.splitlines()[-1])) == {True}
    for service in reversed(services):  # an agent removes its unix socket at its end
        service.process.terminate()
        service.wait()


OBJECTS = """
import os, sys
import rankmesh as dist

class Note:
    def __init__(self): self.padding, self.text = b"A" * 300_000, "x" * 200

dist.init_process_group(timeout=60)
sends = dist.get_rank() == 0
notes, received = [Note(), Note()] if sends else [None, None], [None]
try:
    match sys.argv[1]:
        case "broadcast":
            received = notes[:1]
            dist.broadcast_object_list(received)
        case "all_gather":
            received = [None, None]
            dist.all_gather_object(received, notes[0])
        case "scatter":
            dist.scatter_object_list(received, notes if sends else None)
        case "send":
            dist.send_object_list(notes[:1], dst=1) if sends else dist.recv_object_list(received, src=0)
    print("received", received[0], flush=True)
except dist.DistError as error:
    print(type(error).__name__, error, flush=True)
os._exit(0)
"""

RELAY = """
import socket, sys, threading

def pump(source, target):
    total = 0
    while data := source.recv(1 << 16):
        total += len(data)
        if b"A" * 100 in data:
            print("read an object", flush=True)
        if total > 100_000:  # more than comes before the object
            data = data[:-1] + bytes([data[-1] ^ 1])
            print("changed a byte", flush=True)
        target.sendall(data)

def serve(listener):
    while True:
        client, _ = listener.accept()
        server = socket.create_connection((sys.argv[1], listener.getsockname()[1]))
        for pair in (client, server), (server, client):
            threading.Thread(target=pump, args=pair, daemon=True).start()

for port in sys.argv[2:]:
    threading.Thread(target=serve, args=(socket.create_server(("", int(port))),), daemon=True).start()
print("ready", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("call", ["broadcast", "all_gather", "scatter", "send"])
def test_no_object_is_read_that_a_relay_has_changed(three_hosts: Hosts, call):
    """Rank 0 is reached through host3, which forwards the bytes and does not know the token."""
    hosts = three_hosts
    (hosts.folder / "objects.py").write_text(OBJECTS)
    (hosts.folder / "relay.py").write_text(RELAY)

    def rank(number: str, host: str, **variables: str) -> Started:
        return hosts.start(
            host,
            f"python objects.py {call}",
            RANK=number,
            WORLD_SIZE="2",
            MASTER_ADDR="host1",
            MASTER_PORT="29500",
            RANKMESH_TOKEN="the secret of both hosts",
            RANKMESH_BIND=hosts.addresses[host],
            **variables,
        )

    def ports() -> list[str]:
        """Return the ports of rank 0: of its HTTP, and for its peers."""
        lines = [line.split() for line in hosts.output("host1", "cat /proc/net/tcp").splitlines()[1:]]
        listening = {int(fields[1].split(":")[1], 16) for fields in lines if fields[3] == "0A"}
        return [str(port) for port in listening - {29500}]

    first = rank("0", "host1", RANKMESH_ADVERTISE=hosts.addresses["host3"])
    wait_until(lambda: len(ports()) == 2, "rank 0 listens", 60)
    relay = hosts.start("host3", f"exec python relay.py {hosts.addresses['host1']} {' '.join(ports())}")
    relay.wait_for("ready")
    second = rank("1", "host2")
    assert [first.wait(), second.wait()] == [0, 0], hosts.transcript()
    assert "changed a byte" in relay.output, hosts.transcript()
    assert "RankFailedError rank 0" in second.output, hosts.transcript()
    assert "a record was changed on its way" in second.output, hosts.transcript()
    assert "read an object" not in relay.output
    assert "received" not in second.output, hosts.transcript()
    relay.end()
