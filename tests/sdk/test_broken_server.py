"""A process whose HTTP server cannot be loaded, as of a package that is broken: whoever needs it is told, and soon."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import free_port

pytestmark = pytest.mark.processes

SECONDS = 180.0
"""Limit of a command; the ranks' own limit is half an hour."""
REASON = "ImportError: no wheel"
JOIN = "import rankmesh as dist; dist.init_process_group({})"


@pytest.fixture
def run(tmp_path: Path):
    """Run a Python command in an environment whose uvicorn cannot be imported."""
    package = tmp_path / "broken" / "uvicorn"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('no wheel')")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RANKMESH_", "MASTER_"))}
    environment = {**inherited, "PYTHONPATH": str(package.parent)}

    def call(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=environment | variables,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )

    return call


def test_a_launcher_ends_the_ranks(run, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(JOIN.format(""))
    done = run("-m", "rankmesh.run", "--nproc-per-node", "2", "--failure-grace", "0.1", str(script))
    assert done.returncode == 1
    assert f"[rankmesh] the gateway cannot serve the ranks: {REASON}" in done.stderr
    assert "pip check" in done.stderr


def test_a_launcher_of_several_nodes_ends(run, tmp_path: Path) -> None:
    """It joins the others at its own gateway before it starts ranks."""
    script = tmp_path / "train.py"
    script.write_text(JOIN.format(""))
    nodes = ("--nnodes", "1:2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    done = run("-m", "rankmesh.run", *nodes, "--nproc-per-node", "1", str(script), RANKMESH_TOKEN="a secret" * 4)
    assert done.returncode == 1
    assert f"rankmesh run: the gateway cannot serve the ranks: {REASON}" in done.stderr


def test_a_rank_that_hosts_the_gateway_raises_an_error(run) -> None:
    done = run("-c", JOIN.format(f"init_method='tcp://127.0.0.1:{free_port()}', rank=0, world_size=2"))
    assert done.returncode == 1
    assert re.search(rf"^rankmesh\.DistNetworkError: the gateway, process \d+ .*{REASON}", done.stderr, re.MULTILINE)


@pytest.mark.parametrize(
    "command", [["gateway", "--port", "0"], ["agent", "--port", "0", "--gateway", "http://127.0.0.1:1"]], ids=" ".join
)
def test_a_service_ends(run, command: list[str]) -> None:
    done = run("-c", "from rankmesh.cli import main; main()", *command)
    assert done.returncode == 1
    assert f"cannot be served any more: {REASON}" in done.stderr
