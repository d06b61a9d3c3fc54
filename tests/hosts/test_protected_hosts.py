"""Connections between two hosts are encrypted with TLS, and have MACs without; those inside a host have neither."""

from __future__ import annotations

import json

import pytest
from support.certificates import tls_of
from support.host_commands import Hosts

pytestmark = [pytest.mark.hosts, pytest.mark.processes]

SCRIPT = """
import json
import numpy as np
import rankmesh as dist
from rankmesh_agent.net.tls import TlsSocket
from rankmesh_agent.transports.authenticated import AuthenticatedConnection

def protection(connection):
    if isinstance(connection, AuthenticatedConnection):
        return "MAC"
    return "TLS" if isinstance(getattr(connection, "socket", None), TlsSocket) else "none"

dist.init_process_group()
array = np.ones(1 << 20, np.float32)
dist.all_reduce(array)
assert (array == dist.get_world_size()).all()
engine = dist.group.WORLD._communicator.engine
print(json.dumps({peer: protection(each.connection) for peer, each in engine._peers.items()}), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("protection", ["TLS", "MAC"])
def test_what_leaves_a_host_is_protected(hosts: Hosts, tmp_path, protection, transport):
    (hosts.folder / "train_once.py").write_text(SCRIPT)
    started = []
    for rank, host in enumerate(["host1", "host1", "host2"]):
        secured = tls_of(tmp_path / "certificates", f"{host},{hosts.addresses[host]}") if protection == "TLS" else {}
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
        {"1": "none", "2": protection},
        {"0": "none", "2": protection},
        {"0": protection, "1": protection},
    ]
