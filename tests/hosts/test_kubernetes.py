"""examples/kubernetes: the pods' commands on two test hosts, with the names and variables that a cluster gives them.

There is no Kubernetes here: what it would do is done by hand.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML reads the manifests; it comes with the development dependencies")

pytestmark = [pytest.mark.hosts, pytest.mark.processes]

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "kubernetes"
NAMESPACE = "default.svc.cluster.local"


def container_of(file: str, kind: str) -> dict[str, Any]:
    """Return the container of a manifest's pods."""
    (found,) = (each for each in yaml.safe_load_all((FOLDER / file).read_text()) if each["kind"] == kind)
    (container,) = found["spec"]["template"]["spec"]["containers"]
    return container


def variables_of(container: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "the value of the Secret") for entry in container["env"]}


@pytest.fixture
def pod(hosts) -> Callable[..., Any]:
    """Starts a container as a pod of a name, under a Service's name: of those without one, as the Service itself."""

    def start(host: str, container: dict[str, Any], name: str, service: str = "", **variables: str):
        with (hosts.folder / "etc-hosts").open("a") as names:  # from now on it can be found
            domain = f"{service}.{NAMESPACE}" if service else NAMESPACE
            names.write(f"{hosts.addresses[host]} {name}.{domain} {name}\n")
        command = " ".join(container["command"]).replace("/scripts/", f"{ROOT}/examples/")
        command = command.replace("/var/lib/rankmesh/", f"{hosts.folder}/")
        return hosts.start(host, f"hostname {name}; {command}", **variables_of(container), **variables)

    return start


def test_four_pods(hosts, pod) -> None:
    container = container_of("job/average.yaml", "Job")

    def start(index: int):
        host = f"host{1 + index // 2}"
        return pod(host, container, f"average-{index}", "average", JOB_COMPLETION_INDEX=str(index))

    pods = {index: start(index) for index in (3, 1, 2)}
    pods[3].wait_for(f"still waits for the gateway at http://average-0.average.{NAMESPACE}:29500")  # it has no name yet
    pods[0] = start(0)
    assert [pods[index].wait() for index in range(4)] == [0, 0, 0, 0], hosts.transcript()
    for index in range(4):
        assert f"rank {index} of 4 on average-{index}: 1.5\n" in pods[index].output, hosts.transcript()


def test_a_launcher_in_each_of_two_pods(hosts, pod) -> None:
    container = container_of("job/average.yaml", "Job")
    patch = container_of("launcher/launcher.yaml", "Job")
    container |= {"command": patch["command"]}
    container["env"] = [entry for entry in container["env"] if entry["name"] != "WORLD_SIZE"] + patch["env"]
    pods = [
        pod(f"host{1 + index}", container, f"average-{index}", "average", JOB_COMPLETION_INDEX=str(index))
        for index in (1, 0)
    ]
    assert [each.wait() for each in pods] == [0, 0], hosts.transcript()
    printed = "".join(each.output for each in pods)
    for rank in range(8):
        assert f"rank {rank} of 8 on average-{rank // 4}: 3.5\n" in printed, hosts.transcript()


def test_a_mesh_and_pods_that_attach(hosts, pod) -> None:
    agent, train = container_of("mesh/agents.yaml", "StatefulSet"), container_of("mesh/train.yaml", "Job")
    services = [pod("host1", container_of("mesh/gateway.yaml", "Deployment"), "gateway")]
    services += [pod(f"host{1 + index}", agent, f"agent-{index}", "agents") for index in range(2)]
    train["env"] = [entry for entry in train["env"] if entry["name"] not in ("RANK", "WORLD_SIZE")]  # of a fieldRef; 4
    ranks = [pod(f"host{1 + rank}", train, f"train-{rank}", RANK=str(rank), WORLD_SIZE="2") for rank in range(2)]
    assert [each.wait() for each in ranks] == [0, 0], hosts.transcript()
    for rank in range(2):
        assert f"rank {rank} of 2 on train-{rank}: 0.5\n" in ranks[rank].output, hosts.transcript()
    for service in reversed(services):  # as the kubelet ends a pod
        os.killpg(service.process.pid, signal.SIGTERM)
        service.wait()
    assert not [service for service in services if "Traceback" in service.output], hosts.transcript()
