"""docs/launching.md: torchrun on two hosts, and rankmesh's own init_process_group() in its ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.host_commands import Started, has_torch
from support.processes import wait_until

NEEDS_TORCH = pytest.mark.skipif(not has_torch(), reason="needs torch: make test-torch installs it")
pytestmark = [pytest.mark.hosts, pytest.mark.processes, NEEDS_TORCH]

TESTS = Path(__file__).parents[1]
AVERAGE = TESTS.parent / "examples" / "average.py"
AT_GATEWAY = "--rdzv-backend rankmesh --rdzv-endpoint host1:8700 --rdzv-id average"
WAYS = {
    "static": "--node-rank {node} --master-addr host1 --master-port 29500",
    "c10d": "--rdzv-backend c10d --rdzv-endpoint host2:29500 --rdzv-id average",
    "rankmesh": AT_GATEWAY,
}
"""c10d: whichever host is first gets rank 0, and MASTER_ADDR is host2 all the same."""
TOKEN = {"RANKMESH_TOKEN": "the secret of both"}
GATEWAY = "exec rankmesh gateway --host host1 --port 8700"
ROUNDS = 20
NODE = (
    "exec torchrun --nnodes 1:2 --nproc-per-node 1 --max-restarts 100 --rdzv-conf last_call_timeout=1,join_timeout=90 "
    f"{AT_GATEWAY} elastic.py"
)
ELASTIC = """\
import os, pathlib, time
import numpy as np, rankmesh as dist
from support.torch_port import Client

size = int(os.environ["WORLD_SIZE"])
with Client(int(os.environ["MASTER_PORT"]), os.environ["MASTER_ADDR"]) as store:
    found = store.number("add", "ranks", 1)
    while found < size:
        time.sleep(0.05)
        found = store.number("add", "ranks", 0)
    assert found == size, "the store is of another attempt"
    dist.init_process_group()
    total = np.ones(1)
    dist.all_reduce(total)
    print(f"rank {dist.get_rank()} of {int(total[0])} on {os.uname().nodename}", flush=True)
    over = np.zeros(1)
    while not over:
        over[:] = pathlib.Path("over").exists()
        dist.all_reduce(over)
    dist.destroy_process_group()
"""
"""A rank that counts the ranks of its attempt in torch's store, and then joins at the gateway: all without torch."""


@pytest.mark.parametrize("way", WAYS)
def test_plain_init_process_group(hosts, way) -> None:
    if way == "rankmesh":
        hosts.start("host1", GATEWAY, **TOKEN).wait_for("is ready at")
    started = [
        hosts.start(
            f"host{node + 1}",
            f"python -m torch.distributed.run --nnodes 2 --nproc-per-node 2 {WAYS[way].format(node=node)} {AVERAGE}",
            **TOKEN,
        )
        for node in (0, 1)
    ]
    assert [each.wait(180) for each in started] == [0, 0], hosts.transcript()
    reported = re.findall(r"rank (\d) of 4 on host(\d)", "".join(each.output for each in started))
    assert sorted(rank for rank, _ in reported) == ["0", "1", "2", "3"], hosts.transcript()
    assert sorted(host for _, host in reported) == ["1", "1", "2", "2"], hosts.transcript()


def test_a_node_is_lost_and_back(hosts) -> None:
    """Rounds: a host loses all its processes but the gateway and starts again; or it loses its network for a while."""
    (hosts.folder / "elastic.py").write_text(ELASTIC)
    gateway = hosts.start("host1", GATEWAY, **TOKEN)
    gateway.wait_for("is ready at")
    places = TOKEN | {"RANKMESH_GATEWAY": "http://host1:8700", "RANKMESH_JOB": "average", "PYTHONPATH": str(TESTS)}
    nodes = {host: hosts.start(host, NODE, **places) for host in ("host1", "host2")}
    wait_for_world(2, nodes)
    for number in range(ROUNDS):
        lost, kept = ("host2", "host1") if number % 2 else ("host1", "host2")
        if number % 10 == 9:
            hosts.cut(lost)
            wait_for_world(1, {kept: nodes[kept]})
            nodes[lost].wait_for("torchrun waits for the gateway of job 'average'")
            hosts.heal(lost)
        else:
            hosts.lose(lost, but=gateway)
            wait_for_world(1, {kept: nodes[kept]})
            nodes[lost] = hosts.start(lost, NODE, **places)
        wait_for_world(2, nodes)
        print(f"round {number + 1}: {lost} was lost", flush=True)
    (hosts.folder / "over").touch()
    assert [node.wait(180) for node in nodes.values()] == [0, 0], hosts.transcript()
    assert "GroupAbortedError" not in hosts.transcript(), "ranks of an attempt end with it, and not later"


def wait_for_world(size: int, nodes: dict[str, Started]) -> None:
    """Wait until the last world that the rank of each node has been in has such a size."""

    def is_there(node: Started) -> bool:
        return re.findall(r"rank \d of (\d) on host", node.output)[-1:] == [str(size)]

    def has_ended() -> bool:
        return any(node.process.poll() is not None for node in nodes.values())

    wait_until(lambda: all(map(is_there, nodes.values())) or has_ended(), f"{size} ranks: {nodes}", 120)
    assert not has_ended(), nodes
