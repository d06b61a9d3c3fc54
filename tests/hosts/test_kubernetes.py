"""docs/clusters.md: the manifest's four pods, two on each of two test hosts, with the names that a cluster gives them.

There is no Kubernetes here: what it would do is done by hand.
"""

from __future__ import annotations

from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML reads the manifest; it comes with the development dependencies")

pytestmark = [pytest.mark.hosts, pytest.mark.processes]

ROOT = Path(__file__).parents[2]
DOMAIN = "average.default.svc.cluster.local"


@pytest.fixture
def pod(hosts):
    """Starts a pod of examples/kubernetes/average.yaml."""
    _, job = yaml.safe_load_all((ROOT / "examples" / "kubernetes" / "average.yaml").read_text())
    container = job["spec"]["template"]["spec"]["containers"][0]
    command = " ".join(container["command"]).replace("/scripts/", f"{ROOT}/examples/")
    variables = {entry["name"]: entry.get("value", "the value of the Secret") for entry in container["env"]}

    def start(index: int):
        host = f"host{1 + index // 2}"
        name = f"{job['metadata']['name']}-{index}"
        with (hosts.folder / "etc-hosts").open("a") as names:  # from now on it can be found
            names.write(f"{hosts.addresses[host]} {name}.{DOMAIN} {name}\n")
        return hosts.start(host, f"hostname {name}; {command}", **variables, JOB_COMPLETION_INDEX=str(index))

    return start


def test_four_pods(hosts, pod) -> None:
    pods = {index: pod(index) for index in (3, 1, 2)}
    pods[3].wait_for(f"still waits for the gateway at http://average-0.{DOMAIN}:29500")  # no name stands for it yet
    pods[0] = pod(0)
    assert [pods[index].wait() for index in range(4)] == [0, 0, 0, 0], hosts.transcript()
    for index in range(4):
        assert f"rank {index} of 4 on average-{index}: 1.5\n" in pods[index].output, hosts.transcript()
