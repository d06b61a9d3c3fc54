"""The cluster of compose.yaml, used from this host as a user would."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from support.cluster import AGENTS, GATEWAY, ROOT, Cluster, compose, run
from support.processes import Me, Ranks, wait_until

import rankmesh as dist

pytestmark = [pytest.mark.cluster, pytest.mark.processes]

DIGITS = ROOT / "examples" / "train_digits.py"


@pytest.fixture(autouse=True)
def _all_free(cluster: Cluster) -> Iterator[None]:
    cluster.wait_until_free()
    yield
    for number in range(AGENTS):
        with contextlib.suppress(AssertionError):  # nobody has it
            give_back(cluster, number)
    cluster.wait_until_free()


def test_nobody_else_can_use_it(cluster: Cluster) -> None:
    """Ports are published on loopback only, and wait for the token; nothing runs as root, or can write to its image."""
    containers = json.loads(run("docker", "inspect", *compose("ps", "--quiet").split()).stdout)
    assert len(containers) == AGENTS + 1
    for container in containers:
        published = container["NetworkSettings"]["Ports"].values()
        assert {binding["HostIp"] for bindings in published for binding in bindings} == {"127.0.0.1"}
        assert container["Config"]["User"] == "rankmesh"
        assert container["HostConfig"]["ReadonlyRootfs"]
        assert container["HostConfig"]["CapDrop"] == ["ALL"]
    status = ["curl", "--silent", "--output", "/dev/null", "--write-out", "%{http_code} "]
    urls = [f"{place}/v1/groups" for place in (GATEWAY, cluster.agent(0))]
    assert run(*status, *urls, "-o", "/dev/null").stdout.split() == ["401", "401"]
    assert len(cluster.token) == 64


def test_four_processes_of_this_host_train_on_it(cluster: Cluster, ranks: Ranks) -> None:
    variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": "8700", "RANKMESH_GATEWAY": GATEWAY, "WORLD_SIZE": "4"}
    started = [
        ranks.command(str(DIGITS), name=f"rank-{rank}", **variables, **cluster.client, RANK=str(rank))
        for rank in range(4)
    ]
    ranks.wait(started)
    assert [rank.code for rank in started] == [0] * 4, ranks.transcript()
    assert "all ranks identical" in started[0].stdout
    accuracy = re.search(r"test accuracy: ([\d.]+)%", started[0].stdout)
    assert accuracy is not None
    assert float(accuracy[1]) >= 95
    assert cluster.hosts(ranks.job) == [f"agent-{rank}" for rank in range(4)]


def add(me: Me) -> None:
    me.init(init_method="http://localhost:8700")
    array = np.full(3, 10.0**me.rank)
    dist.all_reduce(array)
    me.report(sum=array.tolist())
    dist.destroy_process_group()


def lease(cluster: Cluster, agent: int, job: str, rank: int, size: int) -> None:
    """Have an agent take a rank of a job, without waiting for the others."""
    wanted = {"job": job, "rank": rank, "world_size": size, "wait": 0}
    cluster.curl("--json", json.dumps(wanted), f"{cluster.agent(agent)}/v1/lease")


def give_back(cluster: Cluster, agent: int) -> None:
    """Have an agent leave its job."""
    cluster.curl("-X", "DELETE", f"{cluster.agent(agent)}/v1/lease")


def joined(cluster: Cluster, agent: int) -> None:
    """Wait until an agent has joined its job."""
    wait_until(
        lambda: json.loads(cluster.curl(f"{cluster.agent(agent)}/v1/lease?wait=10"))["state"] == "joined", "the world"
    )


def test_two_processes_and_two_curls_reduce_together(cluster: Cluster, ranks: Ranks) -> None:
    for number in (2, 3):
        lease(cluster, number, ranks.job, number, 4)
    started = ranks.start(add, 4, ranks=[0, 1], env=cluster.client)

    def reduce(number: int) -> list[float]:
        joined(cluster, number)
        body = io.BytesIO()
        np.save(body, np.full(3, 10.0**number))
        url = f"{cluster.agent(number)}/v1/groups/world/all_reduce?op=sum"
        answer = cluster.curl("-H", "Content-Type: application/x-npy", "--data-binary", "@-", url, data=body.getvalue())
        return np.load(io.BytesIO(answer), allow_pickle=False).tolist()

    with ThreadPoolExecutor(2) as curls:
        assert list(curls.map(reduce, (2, 3))) == [[1111.0] * 3] * 2
    for number in (2, 3):
        give_back(cluster, number)
    ranks.succeed(started)
    assert [rank.reported["sum"] for rank in started] == [[1111.0] * 3] * 2


def test_what_one_agent_is_given_another_has(cluster: Cluster) -> None:
    for number in (0, 1):
        lease(cluster, number, "store", number, 2)
    for number in (0, 1):
        joined(cluster, number)
    cluster.curl("-X", "PUT", "--data-binary", "@-", f"{cluster.agent(1)}/v1/store/greeting", data=b"hello")
    assert cluster.curl(f"{cluster.agent(0)}/v1/store/greeting") == b"hello"
    groups = json.loads(cluster.curl(f"{cluster.agent(0)}/v1/groups"))
    assert groups[0]["medium"] == "shm", "containers of one host share memory"


def reduce_for_ever() -> None:
    """Go round in all_reduce until something happens."""
    array = np.ones(1000)
    while True:
        dist.all_reduce(array)
        array[:] = 1


def reduce_until_killed(me: Me) -> None:
    me.init(init_method="http://localhost:8700")
    dist.barrier()
    me.mark(f"going-{me.rank}")
    me.report(**me.attempt(reduce_for_ever))


def inspect(service: str) -> dict[str, Any]:
    """What Docker knows of a service's container."""
    (container,) = json.loads(run("docker", "inspect", compose("ps", "--all", "--quiet", service).strip()).stdout)
    return container


def kill(service: str) -> None:
    """End a container's process from outside, as the out-of-memory killer would: its restart policy acts then."""
    (container,) = json.loads(run("docker", "inspect", compose("ps", "--quiet", service).strip()).stdout)
    pid = container["State"]["Pid"]
    run(
        "docker",
        "run",
        "--rm",
        "--pid",
        "host",
        "--user",
        "0",
        "rankmesh",
        "python",
        "-c",
        f"import os; os.kill({pid}, 9)",
    )


def test_an_agent_that_is_killed_is_named_and_comes_back(cluster: Cluster, ranks: Ranks) -> None:
    started = ranks.start(reduce_until_killed, 4, env=cluster.client)
    ranks.wait_for(*(f"going-{rank}" for rank in range(4)))
    name = cluster.hosts(ranks.job)[2]
    kill(name)
    ranks.wait(started)
    assert [rank.code for rank in started] == [0] * 4, ranks.transcript()
    for rank in started:
        assert rank.reported["error"] == "RankFailedError", ranks.transcript()
        assert rank.reported["ranks"] == [2], ranks.transcript()
        assert name in rank.reported["text"], ranks.transcript()
    compose("up", "--detach", "--wait", "--wait-timeout", "60", "--no-recreate")
    cluster.wait_until_free()
    ranks.job += "-again"
    again = ranks.start(add, 4, env=cluster.client)
    ranks.succeed(again)
    assert [rank.reported["sum"] for rank in again] == [[1111.0] * 3] * 4


def test_a_gateway_that_is_killed_comes_back_and_knows_the_agents_and_the_job(cluster: Cluster, ranks: Ranks) -> None:
    for number in (0, 1):
        lease(cluster, number, ranks.job, number, 2)
    for number in (0, 1):
        joined(cluster, number)
    kill("gateway")
    compose("up", "--detach", "--wait", "--wait-timeout", "60", "--no-recreate")
    wait_until(lambda: sorted(cluster.agents().values()) == ["free", "free", "leased", "leased"], "the agents")
    wait_until(lambda: cluster.hosts(ranks.job) == ["agent-0", "agent-1"], "the ranks")


def test_the_demo(cluster: Cluster) -> None:
    built = run("docker", "compose", "--profile", "demo", "build", "demo-0", seconds=900, check=False)
    if "No matching distribution" in built.stderr + built.stdout:
        pytest.skip("the example's libraries cannot be installed here")
    assert not built.returncode, built
    services = [f"demo-{rank}" for rank in range(4)]
    compose("--profile", "demo", "up", "--detach", "--no-recreate", *services)
    wait_until(lambda: all(inspect(each)["State"]["Status"] == "exited" for each in services), "the end of the demo")
    reported = compose("--profile", "demo", "logs", "--no-color", *services)
    assert [inspect(service)["State"]["ExitCode"] for service in services] == [0] * 4, reported
    assert "all ranks identical" in reported
    compose("--profile", "demo", "rm", "--force", *services)


def test_another_number_of_agents(cluster: Cluster, tmp_path) -> None:
    override = tmp_path / "compose.override.yaml"
    override.write_text(
        run(sys.executable, "docker/agents.py", "5").stdout.replace("compose.yaml", f"{ROOT}/compose.yaml")
    )
    files = {"COMPOSE_FILE": f"compose.yaml:{override}"}
    compose("up", "--detach", "--wait", "--wait-timeout", "60", "--no-recreate", **files)
    assert cluster.agents()["agent-4"] == "free"
    assert cluster.get("http://localhost:8705/v1/info")["member"]["host"] == "agent-4"
    compose("rm", "--stop", "--force", "agent-4", **files)
    wait_until(lambda: "agent-4" not in cluster.agents(), "the gateway to forget the agent")
