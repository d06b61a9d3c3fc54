"""The token from another host: over TLS, and without where the operator says so."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.hosts, pytest.mark.processes]

TOKEN = "the secret that both hosts know"
GATEWAY = "exec rankmesh gateway --host 0.0.0.0 --port 8700"
CURL = f"curl -s -w ' %{{http_code}}' -H 'Authorization: Bearer {TOKEN}'"


@pytest.mark.parametrize(("private", "status"), [("", "403"), ("1", "200")])
def test_it_is_accepted_on_a_private_network_alone(hosts, private, status) -> None:
    gateway = hosts.start("host1", GATEWAY, RANKMESH_TOKEN=TOKEN, RANKMESH_PRIVATE_NETWORK=private)
    gateway.wait_for("ready")
    plain = f"{CURL} http://host1:8700/v1/jobs"
    assert hosts.output("host1", plain).endswith(" 200"), "from the gateway's own host, by its address"
    answer = hosts.output("host2", plain)
    assert answer.endswith(f" {status}")
    assert ("cleartext-token" in answer) == (not private)
    assert hosts.output("host2", "rankmesh get http://host1:8700/v1/jobs", RANKMESH_TOKEN=TOKEN) == "[]"
    gateway.end()


def test_curl_checks_the_gateway_by_the_authority_of_the_token(hosts) -> None:
    gateway = hosts.start("host1", GATEWAY, RANKMESH_TOKEN=TOKEN)
    gateway.wait_for("ready")
    for name, token, status in (("ours", TOKEN, "[] 200"), ("theirs", TOKEN + "!", " 000")):
        hosts.output("host2", f"rankmesh token --ca > {name}.pem", RANKMESH_TOKEN=token)
        for host in ("host1", hosts.addresses["host1"]):
            answer = hosts.start("host2", f"{CURL} --cacert {name}.pem https://{host}:8700/v1/jobs")
            answer.wait()
            assert answer.output == status
    gateway.end()


FORWARD = """
import socket, threading

def pump(source, target):
    while data := source.recv(1 << 16):
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)

listener = socket.create_server(("127.0.0.1", 8700))
print("ready", flush=True)
while True:
    client, _ = listener.accept()
    server = socket.create_connection(("host1", 8700))
    for pair in (client, server), (server, client):
        threading.Thread(target=pump, args=pair, daemon=True).start()
"""
STORE = """
import rankmesh as dist
from rankmesh_agent.store.client import StoreClient
from rankmesh_agent.store.commands import Set
from rankmesh_agent.wire.errors import StoreLostError
import os
try:
    StoreClient("http://127.0.0.1:8700", os.environ["RANKMESH_TOKEN"], bytes(16)).execute(Set("key", b"value"))
except StoreLostError:
    print("accepted")
"""


def test_a_port_that_is_forwarded_to_another_host(hosts) -> None:
    """As a container's published port: the client takes it for one of this host, until the gateway asks for TLS."""
    for name, text in (("forward", FORWARD), ("store", STORE)):
        (hosts.folder / f"{name}.py").write_text(text)
    gateway = hosts.start("host1", GATEWAY, RANKMESH_TOKEN=TOKEN)
    gateway.wait_for("ready")
    forwarder = hosts.start("host2", "exec python forward.py")
    forwarder.wait_for("ready")
    assert hosts.output("host2", "rankmesh get http://127.0.0.1:8700/v1/jobs", RANKMESH_TOKEN=TOKEN) == "[]"
    assert hosts.output("host2", "python store.py", RANKMESH_TOKEN=TOKEN) == "accepted\n"
    forwarder.end()
    gateway.end()
