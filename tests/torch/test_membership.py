"""How torch's groups come to the mesh and leave it: init methods, stores, launchers, hostings. Ranks are processes."""

from __future__ import annotations

import datetime
import os
import re
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as c10d
from support import hosting
from support.processes import Me, Ranks, free_port, on_ranks, wait_until

import rankmesh

pytestmark = pytest.mark.processes


def summed(group: Any = None) -> float:
    """Return the sum over all ranks of their ranks plus one."""
    tensor = torch.full((3,), c10d.get_rank() + 1.0)
    c10d.all_reduce(tensor, group=group)
    return float(tensor[0])


@on_ranks(2)
def test_every_init_method_of_torchs(me: Me, ports: list[int]) -> None:
    """The default group is made in each way that torch has, twice with a store that was used before."""
    at = {"rank": me.rank, "world_size": me.size, "timeout": datetime.timedelta(seconds=60)}
    os.environ |= {"RANK": str(me.rank), "WORLD_SIZE": str(me.size), "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(ports[0])
    kept = c10d.TCPStore("127.0.0.1", ports[1], me.size, me.rank == 0)
    ways: list[dict[str, Any]] = [
        {},
        {"init_method": f"file://{me.folder}/file", **at},
        {"init_method": f"tcp://127.0.0.1:{ports[2]}", **at},
        {"store": kept, **at},
        {"store": kept, **at},
        {"store": c10d.FileStore(f"{me.folder}/store", me.size), **at},
    ]

    def sockets() -> int:
        return sum(count for kind, count in me.resources()[1].items() if "socket" in kind)

    def settled() -> bool:
        return sockets() <= most

    most = 1000
    for number, way in enumerate(ways):
        c10d.init_process_group("rankmesh", **way)
        assert c10d.group.WORLD.gateway.startswith("http://127.0.0.1:")
        assert rankmesh.get_rank() == me.rank  # the SDK is in the same world
        assert summed() == 3
        shown = rf"<rankmesh\.torch\.ProcessGroup '.+', rank {me.rank} of 2, shm, \d+ calls>"
        assert re.fullmatch(shown, repr(c10d.group.WORLD))
        c10d.destroy_process_group()
        assert not rankmesh.is_initialized()
        wait_until(lambda: not any(name.startswith("rankmesh") for name in me.resources()[0]), "threads to end", 30)
        wait_until(settled, f"at most {most} sockets after way {number}", 30)
        if number == 3:
            most = sockets()  # those of torch's stores: no more with every round


@pytest.fixture
def ports() -> list[int]:
    return [free_port() for _ in range(3)]


@on_ranks(3)
def test_groups_beside_gloo_and_beside_the_sdk(me: Me) -> None:
    at = {"rank": me.rank, "world_size": me.size}
    c10d.init_process_group("gloo", init_method=f"file://{me.folder}/gloo", **at)
    odd = c10d.new_group([0, 2], backend="rankmesh")
    whole = c10d.new_group(backend="rankmesh")
    assert me.rank == 1 or summed(odd) == 4
    assert [summed(), summed(whole)] == [6, 6]
    assert not rankmesh.is_initialized()
    c10d.destroy_process_group()

    c10d.init_process_group("rankmesh", init_method=f"file://{me.folder}/mesh", **at)
    gloos = c10d.new_group([0, 2], backend="gloo")
    ours = c10d.new_group([2, 0])
    assert summed() == 6
    assert me.rank == 1 or [summed(gloos), summed(ours)] == [4, 4]
    c10d.destroy_process_group()

    rankmesh.init_process_group(init_method=f"file://{me.folder}/sdk", **at)
    with pytest.raises(ValueError, match="rankmesh's world"):
        c10d.init_process_group("rankmesh", store=c10d.HashStore(), rank=0, world_size=1)
    c10d.init_process_group("rankmesh", init_method=f"file://{me.folder}/torch", **at)
    assert summed() == 6
    c10d.destroy_process_group()
    array = np.ones(1)
    rankmesh.all_reduce(array)  # the SDK's own world goes on
    assert array[0] == 3
    rankmesh.destroy_process_group()


@pytest.fixture
def gateway() -> str:
    return hosting.cluster({}, 2, "torch").url


@on_ranks(2)
def test_ranks_attach_to_standalone_agents(me: Me, gateway: str) -> None:
    os.environ |= {"RANKMESH_HOSTING": "attached", "RANKMESH_GATEWAY": gateway}
    at = {"init_method": f"file://{me.folder}/store", "rank": me.rank, "world_size": me.size}
    c10d.init_process_group("rankmesh", **at)
    group = c10d.new_group([0, 1])
    works = [c10d.all_reduce(torch.ones(1), group=group, async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
        assert work.get_future().wait()[0].item() == 2
    assert [summed(), summed(group)] == [3, 3]
    assert c10d.group.WORLD.gateway == gateway
    c10d.destroy_process_group()


def make_mistakes(me: Me) -> None:
    soon = datetime.timedelta(seconds=4)
    store = c10d.HashStore()
    alone = {"store": store, "rank": 0, "world_size": 1}
    me.report(
        missing=me.attempt(c10d.init_process_group, "rankmesh", store=store, rank=0, world_size=2, timeout=soon),
        options=me.attempt(c10d.init_process_group, "rankmesh", pg_options=object(), **alone),
    )
    os.environ["RANKMESH_HOSTING"] = "attached"
    me.report(attached=me.attempt(c10d.init_process_group, "rankmesh", **alone))
    os.environ["RANKMESH_HOSTING"] = "embedded"
    c10d.init_process_group("rankmesh", **alone)
    c10d.barrier()
    me.report(threads=me.resources()[0])
    # ends without destroy_process_group


def test_mistakes_are_named(ranks: Ranks) -> None:
    (rank,) = ranks.start(make_mistakes, 1)
    ranks.wait([rank])
    assert rank.code == 0, rank
    missing = rank.reported["missing"]
    assert (missing["error"], missing["ranks"]) == ("JoinTimeoutError", [1])
    assert missing["is"].count("DistNetworkError") == 2
    assert "pg_options" in rank.reported["options"]["text"]
    assert "RANKMESH_GATEWAY" in rank.reported["attached"]["text"]


SCRIPT = """\
import torch, torch.distributed as c10d
for backend in ("rankmesh", "gloo", "rankmesh"):
    c10d.init_process_group(backend)
    ones = torch.ones(2)
    c10d.all_reduce(ones)
    print(backend, c10d.get_rank(), c10d.get_world_size(), ones.tolist(), flush=True)
    c10d.destroy_process_group()
"""


def test_env_under_rankmesh_run_is_the_meshs_store(ranks: Ranks, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)  # imports torch alone: the entry point has to be there
    job = ranks.command("-m", "rankmesh.run", "--nproc-per-node", "2", str(script), name="run")
    ranks.wait([job])
    assert job.code == 0, job
    lines = sorted(re.sub(r"^\[rank \d\] ", "", line) for line in job.stdout.splitlines())
    expected = [f"{name} {rank} 2 [2.0, 2.0]" for name in ("gloo", "rankmesh", "rankmesh") for rank in (0, 1)]
    assert lines == sorted(expected), job


def test_importing_torch_loads_next_to_nothing_of_ours(ranks: Ranks) -> None:
    code = "import torch, sys; print(*sorted(name for name in sys.modules if name.startswith('rankmesh')))"
    rank = ranks.command("-c", f"{code}; print(torch.distributed.Backend('RankMesh'))", name="import")
    ranks.succeed([rank])
    assert rank.stdout.splitlines() == [
        ("rankmesh rankmesh.torch rankmesh_agent rankmesh_agent.config rankmesh_agent.config.env"),
        "rankmesh",
    ]


def come_as_launched(me: Me) -> None:
    """Plain ``env://`` of torch's, which would want RANK and three more."""
    c10d.init_process_group("rankmesh")
    assert c10d.get_rank() == rankmesh.get_rank() == me.rank
    me.report(sum=summed(), gateway=c10d.group.WORLD.gateway)
    c10d.destroy_process_group()


def test_under_slurm_torchs_env_needs_no_more_variables(ranks: Ranks) -> None:
    job = secrets.randbelow(1 << 30)
    step = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "0"}
    env = lambda rank: {**step, "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_PROCID": str(rank)}  # noqa: E731
    for rank in ranks.run(come_as_launched, 2, env=env):
        assert rank.reported["sum"] == 3.0
        assert rank.reported["gateway"] == f"http://127.0.0.1:{20000 + job % 9000}"
