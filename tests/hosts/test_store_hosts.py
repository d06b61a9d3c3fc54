"""The store beside hosts that are cut off for a while, and a gateway that is killed: nothing waits, nothing is lost."""

from __future__ import annotations

import json
import time

import pytest
from support.host_commands import Hosts, Started
from support.processes import wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.processes]

KEYS = 10_000
ENVIRONMENT = {"RANKMESH_TOKEN": "the secret of all", "MASTER_ADDR": "host1", "MASTER_PORT": "29500"}
CALLS = """
import json, os, pathlib, time
import rankmesh as dist

dist.init_process_group(timeout=60)
rank, store = dist.get_rank(), dist.get_default_store()
dist.barrier()
pathlib.Path(f"going-{rank}").touch()
calls, longest = 0, 0.0
while not pathlib.Path("over").exists():
    began = time.monotonic()
    store.set(f"key-{rank}", str(calls))
    assert store.get(f"key-{rank}") == str(calls).encode()
    store.add("calls", 2)
    calls, longest = calls + 2, max(longest, time.monotonic() - began)
    time.sleep(0.01)
print(json.dumps({"calls": calls, "longest": longest}), flush=True)
pathlib.Path(f"ended-{rank}").touch()
while not all(pathlib.Path(f"ended-{each}").exists() for each in range(3)):
    time.sleep(0.01)
assert rank or store.add("calls", 0) == int(store.get("calls"))
print("sum", store.add("calls", 0), flush=True)
os._exit(0)
"""
LIVEZ = """
import time, urllib.request
while True:
    began = time.monotonic()
    assert urllib.request.urlopen("http://host1:29500/livez", timeout=20).status == 200
    print("livez", time.monotonic() - began, flush=True)
    time.sleep(0.1)
"""
TRAINS = f"""
import pathlib, time
import numpy as np
import rankmesh as dist

dist.init_process_group(timeout=60)
rank, store, over = dist.get_rank(), dist.get_default_store(), np.zeros(1)
if rank == 0:
    for first in range(0, {KEYS}, 1000):
        numbers = range(first, first + 1000)
        store.multi_set([f"key-{{number}}" for number in numbers], [str(number) for number in numbers])
dist.barrier()
steps = 0
while not over[0]:
    gradient = np.full(1000, steps)
    dist.all_reduce(gradient)
    assert (gradient == 2 * steps).all()
    steps += 1
    print("step", steps, flush=True)
    over[0] = pathlib.Path("enough").exists()
    dist.broadcast(over, 0)
    time.sleep(0.01)
store.add("after", 1)
found = store.multi_get([f"key-{{number}}" for number in range({KEYS})])
assert found == [str(number).encode() for number in range({KEYS})]
print("all", len(found), "keys,", steps, "steps", flush=True)
dist.destroy_process_group()
"""


def start_gateway(hosts: Hosts) -> Started:
    gateway = hosts.start("host1", "exec rankmesh gateway --host host1 --port 29500 --state state.db", **ENVIRONMENT)
    gateway.wait_for("29500")
    return gateway


def start_ranks(hosts: Hosts, program: str, *names: str) -> list[Started]:
    (hosts.folder / "program.py").write_text(program)
    place = {**ENVIRONMENT, "WORLD_SIZE": str(len(names))}
    return [
        hosts.start(name, "exec python program.py", RANK=str(rank), RANKMESH_BIND=hosts.addresses[name], **place)
        for rank, name in enumerate(names)
    ]


@pytest.mark.parametrize("seconds", [5, 15, 40])
def test_a_host_is_cut_off_and_comes_back(three_hosts: Hosts, seconds: int) -> None:
    """Calls of the other ranks go on meanwhile, and each call is made once, those of the cut rank, too."""
    hosts = three_hosts
    start_gateway(hosts)
    ranks = start_ranks(hosts, CALLS, "host1", "host2", "host3")
    for rank in range(3):
        wait_until((hosts.folder / f"going-{rank}").exists, f"rank {rank}")
    (hosts.folder / "livez.py").write_text(LIVEZ)
    livez = hosts.start("host1", "exec python livez.py")
    hosts.cut("host3")
    time.sleep(seconds)
    hosts.heal("host3")
    (hosts.folder / "over").touch()
    assert [each.wait(120) for each in ranks] == [0, 0, 0], hosts.transcript()
    reported = [json.loads(each.output.splitlines()[-2]) for each in ranks]
    assert all(each["longest"] < seconds / 2 for each in reported[:2]), reported
    total = f"sum {sum(each['calls'] for each in reported)}"
    assert all(each.output.splitlines()[-1] == total for each in ranks), hosts.transcript()
    waits = [float(line.split()[1]) for line in livez.output.splitlines()]
    assert len(waits) > 2 * seconds, livez
    assert max(waits) < seconds / 2, livez


def test_a_gateway_is_killed_in_mid_training(hosts: Hosts) -> None:
    """It has 10 000 keys, which the next one has; the training does not notice."""
    gateway = start_gateway(hosts)
    ranks = start_ranks(hosts, TRAINS, "host1", "host2")
    for each in ranks:
        each.wait_for("step 20")
    gateway.end()
    before = [each.output.count("step") for each in ranks]
    for each, steps in zip(ranks, before, strict=True):
        each.wait_for(f"step {steps + 20}")
    start_gateway(hosts)
    (hosts.folder / "enough").touch()
    assert [each.wait() for each in ranks] == [0, 0], hosts.transcript()
    assert all(f"all {KEYS} keys" in each.output for each in ranks), hosts.transcript()
