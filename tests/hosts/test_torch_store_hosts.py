"""A client of torch's store on another host than the launcher."""

from __future__ import annotations

import pytest
from support.torch_port import request

from rankmesh_gateway.torch_store import PREFACE

pytestmark = [pytest.mark.hosts, pytest.mark.processes]

RANK = "--no-python sh -c 'echo ready; exec sleep 300'"
JOB = f"exec rankmesh run --nproc-per-node 1 --master-addr host1 --master-port 29500 {RANK}"
SENT = PREFACE + request("ping") + b"1234" + request("add", "n", 5)
CLIENT = f"""python -c "
import socket
with socket.create_connection(('host1', 29500), 60) as sock:
    sock.sendall(bytes.fromhex('{SENT.hex()}'))
    received = b''
    while len(received) < 12 and (piece := sock.recv(99)):
        received += piece
    print(received.hex())
"
"""
PONG, FIVE = b"1234".hex(), (5).to_bytes(8, "little").hex()


@pytest.mark.parametrize("private", ["", "1"])
def test_it_is_served_on_a_private_network_alone(hosts, private) -> None:
    job = hosts.start("host1", JOB, RANKMESH_PRIVATE_NETWORK=private)
    job.wait_for("ready")
    assert hosts.output("host2", CLIENT).strip() == (PONG + FIVE if private else PONG)
    if not private:
        job.wait_for("authentication, so other hosts are served only where the network is declared private")
        assert hosts.output("host1", CLIENT).strip() == PONG + FIVE, "the launcher's own host, by its address"
    job.end()
