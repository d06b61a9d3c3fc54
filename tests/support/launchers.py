"""Launchers as processes, and the start of the scripts that their ranks run."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from support.forked_python import ForkedPopen
from support.processes import free_port, wait_until

SECONDS = 180.0
TESTS = Path(__file__).parents[1]
OURS = ("RANKMESH_", "MASTER_", "OMP_", "RANK", "WORLD_SIZE", "LOCAL_", "TORCHELASTIC_", "GROUP_", "ROLE_")
SCRIPT = """
import json, os, signal, sys, time
import numpy as np
import rankmesh as dist
from support.me import wait_until
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def write(name):
    with open(f".{name}.{rank}", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f".{name}.{rank}", f"{name}.{attempt}.{rank}")
def all_wrote(name):
    wait_until(lambda: all(os.path.exists(f"{name}.{attempt}.{other}") for other in range(size)), name)
def all_reduce():
    array = np.full(4, rank + 1.0)
    dist.all_reduce(array)
    assert array.tolist() == [size * (size + 1) / 2] * 4, array
    print("sum", attempt, flush=True)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Launchers:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def start(self, script: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        (self.folder / "script.py").write_text(SCRIPT + textwrap.dedent(script))
        return self.process(sys.executable, "-m", "rankmesh.run", *arguments, "script.py", **variables)

    def process(self, *command: str, **variables: str) -> subprocess.Popen[str]:
        """Start a command with the environment of a launcher."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        own = {
            "RANKMESH_TOKEN": "the secret of all",
            "RANKMESH_SHM_DIR": str(self.folder / "shm"),
            "PYTHONPATH": str(TESTS),
            "OPENBLAS_NUM_THREADS": "1",
        }
        launcher = ForkedPopen(command, cwd=self.folder, env=environment | own | variables, text=True)
        self.started.append(launcher)
        return launcher

    def finish(self, launcher: subprocess.Popen[str]) -> tuple[int, str, list[str]]:
        """Return the exit code, stdout, and the launcher's own lines."""
        stdout, stderr = launcher.communicate(timeout=SECONDS)
        print(stderr)
        return launcher.returncode, stdout, [line for line in stderr.splitlines() if line.startswith("[rankmesh]")]

    def run(self, script: str, *arguments: str) -> tuple[int, str, list[str]]:
        return self.finish(self.start(script, *arguments))

    def start_nodes(self, script: str, *arguments: str, **variables: str) -> list[subprocess.Popen[str]]:
        """Start a launcher for each of two nodes with a rank."""
        self.nodes = ("--nnodes=2", "--nproc-per-node=1", f"--master-port={free_port()}", *arguments)
        return [self.start(script, f"--node-rank={node}", *self.nodes, **variables) for node in range(2)]

    def pids(self, name: str, attempt: int, count: int) -> list[int]:
        """Return the process ids that the ranks of an attempt write, once they are there."""
        pattern = f"{name}.{attempt}.*"
        wait_until(lambda: len(list(self.folder.glob(pattern))) == count, f"{count} files {pattern}", seconds=60)
        return [int(path.read_text()) for path in self.folder.glob(pattern)]
