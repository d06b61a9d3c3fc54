"""``rankmesh run --nnodes MIN:MAX``: nodes are lost and join, the ranks that are there start again."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.launchers import Launchers
from support.processes import free_port, wait_until

pytestmark = pytest.mark.processes

TOLD = """
    told = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(("TORCHELASTIC_", "GROUP_"))}
    told |= {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")}
    print("told", json.dumps(told), flush=True)
    attempt, restarts = int(os.environ["RANKMESH_ATTEMPT"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group()
    all_reduce()
"""


class Nodes(Launchers):
    """Launchers of one job on this host, each a node."""

    def options(self, *arguments: str, port: bool = True) -> None:
        self.port = free_port()
        place = (f"--master-port={self.port}",) if port else ()
        self.given = (*place, "--failure-grace=20", "--stop-grace=5", *arguments)

    def node(self, script: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        return self.start(TOLD + script, *self.given, *arguments, **variables)

    def impatient(self, script: str = "pass", seconds: int = 5) -> subprocess.Popen[str]:
        """Start a node that gives up after some seconds, and reports every 0.5 s until then what it waits for."""
        (self.folder / "impatient.py").write_text(script)
        given = (*self.given, "impatient.py")
        return self.process(sys.executable, "-c", IMPATIENT, *given, RANKMESH_TIMEOUT=str(seconds))

    def first(self, script: str) -> subprocess.Popen[str]:
        """Start the node that has the gateway."""
        node = self.node(script)
        wait_until(lambda: listens(self.port), "the gateway")
        return node

    def wait_for(self, name: str, count: int) -> list[Path]:
        """Wait until so many ranks, of any attempt, have written a file."""
        wait_until(lambda: len(list(self.folder.glob(f"{name}.*"))) == count, f"{count} files {name}", seconds=60)
        return list(self.folder.glob(f"{name}.*"))

    def told(self, stdout: str) -> list[dict[str, str]]:
        return [json.loads(line.partition("told ")[2]) for line in stdout.splitlines() if "told " in line]


IMPATIENT = """
import sys
from rankmesh._launcher import node_rendezvous
node_rendezvous.FIRST_REPORT_SECONDS = node_rendezvous.REPORT_SECONDS = 0.5
from rankmesh.run import main
sys.exit(main(prog="python -m rankmesh.run"))
"""


def listens(port: int) -> bool:
    """Return whether a gateway listens at a port."""
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    (tmp_path / "shm").mkdir()
    nodes = Nodes(tmp_path)
    yield nodes
    for node in nodes.started:
        if node.poll() is None:
            node.kill()
        node.communicate()


UNTIL = """
    write(f"size-{{size}}-{{restarts}}")
    while (size, restarts) != ({size}, {restarts}):
        try:
            dist.barrier()
            time.sleep(0.01)
        except dist.DistError as error:
            print("ended", type(error).__name__, error.ranks, error, flush=True)
            raise
    dist.barrier()
    dist.destroy_process_group()
"""
"""Ranks that go on until the job has so many, after so many restarts: a node may come a moment later than another."""


def test_a_node_that_joins(nodes: Nodes) -> None:
    nodes.options("--nnodes=1:2", "--nproc-per-node=2", "--last-call=0")
    first = nodes.node(UNTIL.format(size=4, restarts=0))
    nodes.wait_for("size-2-0", 2)
    second = nodes.node(UNTIL.format(size=4, restarts=0))
    code, stdout, lines = nodes.finish(first)
    assert code == 0
    told = nodes.told(stdout)
    assert [(each["GROUP_RANK"], each["GROUP_WORLD_SIZE"], each["WORLD_SIZE"]) for each in told] == [
        *[("0", "1", "2")] * 2,
        *[("0", "2", "4")] * 2,
    ]
    assert {each["TORCHELASTIC_RESTART_COUNT"] for each in told} == {"0"}, "a node that joins uses no restart"
    why = f"node {os.uname().nodename} joins: the job starts again with 2 nodes"
    assert stdout.count(f"ended GroupAbortedError () {why}") == 2, "each rank is told"
    assert f"[rankmesh] {why}; those of this node get 20 s to end" in lines
    assert "[rankmesh] all 4 ranks start again on 2 nodes; this is node 0" in lines
    assert not any("failed" in line for line in lines), lines
    code, stdout, lines = nodes.finish(second)
    assert code == 0
    assert sorted((each["RANK"], each["GROUP_RANK"]) for each in nodes.told(stdout)) == [("2", "1"), ("3", "1")]
    assert any("2 ranks on node 1 of 2" in line for line in lines)


def test_a_node_that_is_lost_and_comes_back(nodes: Nodes) -> None:
    """Three nodes, of which two go on until the third comes back."""
    script = """
    write(f"size-{size}-{restarts}")
    while (size, restarts) != (3, 1):
        dist.barrier()
        time.sleep(0.01)
    dist.barrier()
    """
    nodes.options("--nnodes=2:3", "--nproc-per-node=1", "--last-call=4", "--max-restarts=1")
    first = nodes.first(script)
    others = [nodes.node(script) for _ in range(2)]
    nodes.wait_for("size-3-0", 3)
    lost, kept = others
    lost.kill()
    lost.communicate()
    nodes.wait_for("size-2-1", 2)
    back = nodes.node(script)
    found = [nodes.finish(node) for node in (first, kept, back)]
    assert [code for code, _, _ in found] == [0, 0, 0]
    told = [
        [(each["WORLD_SIZE"], each["TORCHELASTIC_RESTART_COUNT"]) for each in nodes.told(out)][-3:]
        for _, out, _ in found
    ]
    assert told == [[("3", "0"), ("2", "1"), ("3", "1")]] * 2 + [[("3", "1")]]
    assert any("restart 1 of 1: all 2 ranks start again on 2 nodes; this is node 0" in line for line in found[0][2])
    assert [nodes.told(out)[-1]["RANK"] for _, out, _ in found] == ["0", "1", "2"]


def test_nodes_that_are_missing(nodes: Nodes) -> None:
    nodes.options("--nnodes=2:3", "--nproc-per-node=1", "--last-call=1")
    node = nodes.impatient()
    stdout, stderr = node.communicate(timeout=180)
    assert (node.returncode, stdout) == (2, "")
    there = f"1 of at least 2 node(s) are there: {os.uname().nodename}"
    assert f"waits for the nodes of job '127.0.0.1-{nodes.port}' at http://127.0.0.1:{nodes.port}: {there} (" in stderr
    assert "rankmesh run: waited 5 s for the nodes of job" in stderr


def test_a_gateway_that_is_missing(nodes: Nodes) -> None:
    nodes.options("--nnodes=1:2", "--last-call=0", f"--gateway=127.0.0.1:{free_port()}", "--rdzv-id=mine", port=False)
    node = nodes.impatient()
    _, stderr = node.communicate(timeout=180)
    assert node.returncode == 2
    assert "[rankmesh] waits for the gateway of job 'mine' at http://127.0.0.1:" in stderr


@pytest.fixture
def gateway(nodes: Nodes) -> Callable[[], subprocess.Popen[str]]:
    """Start a gateway: always at one port, for whose job the options are."""
    port = free_port()
    nodes.options(f"--gateway=http://127.0.0.1:{port}", "--rdzv-id=mine", "--max-restarts=1", port=False)

    def start() -> subprocess.Popen[str]:
        found = nodes.process(sys.executable, "-m", "rankmesh_gateway", "--port", str(port))
        wait_until(lambda: listens(port), "the gateway")
        return found

    return start


def test_with_a_gateway_elsewhere_any_node_may_be_lost(nodes: Nodes, gateway: Callable[[], subprocess.Popen[str]]):
    process = gateway()
    nodes.given += ("--nnodes=1:2",)
    script = UNTIL.format(size=1, restarts=1)
    lost, kept = nodes.node(script), nodes.node(script)
    nodes.wait_for("size-2-0", 2)
    lost.kill()
    lost.communicate()
    code, stdout, _ = nodes.finish(kept)
    assert code == 0
    told = [(each["RANK"], each["WORLD_SIZE"], each["TORCHELASTIC_RESTART_COUNT"]) for each in nodes.told(stdout)]
    assert told[-1] == ("0", "1", "1")
    process.terminate()
    assert process.wait(180) == 0


def test_a_gateway_starts_again_while_a_node_of_the_next_run_waits(
    nodes: Nodes, gateway: Callable[[], subprocess.Popen[str]]
) -> None:
    """Of the attempts of the run before, only this node knows."""
    process = gateway()
    nodes.given += ("--nnodes=2:3", "--last-call=0")
    script = "import rankmesh as dist; dist.init_process_group(); dist.barrier(); dist.destroy_process_group()"
    assert [nodes.finish(node)[0] for node in [nodes.impatient(script, 60) for _ in range(2)]] == [0, 0]
    first = nodes.impatient(script, 60)
    assert "waits for the nodes of job 'mine'" in first.stderr.readline()
    process.kill()
    process.communicate()
    gateway()
    ends = [nodes.finish(node) for node in (first, nodes.impatient(script, 60))]
    assert [code for code, _, _ in ends] == [0, 0]
