"""Gateways and standalone agents that tests share, for tests that run in both hostings.

With ``RANKMESH_TEST_HOSTING=attached`` the ranks of a test attach to standalone agents in place of having their own.
Agents with the same variables are started once for all tests of the process that runs them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest

from support import forked_python
from support.forked_python import Python
from support.me import GATEWAY, wait_until
from support.rank_server import MARKER, ForkedProcess, fork

ATTACHED = os.environ.get("RANKMESH_TEST_HOSTING", "embedded") == "attached"
"""Whether ranks attach."""
_AGENTS = ("RANKMESH_TOKEN", "RANKMESH_TRANSPORT", "RANKMESH_SLOT_BYTES", "RANKMESH_EAGER_BYTES", "RANKMESH_SHM_DIR")
"""Variables that are as much the agents' as the ranks'."""
_START_SECONDS = 60.0

embedded_only: Callable[[str], pytest.MarkDecorator] = lambda reason: pytest.mark.skipif(ATTACHED, reason=reason)  # noqa: E731
"""Marks a test that makes no sense where ranks attach."""


class Cluster:
    """A gateway and agents.

    Args:
        variables: of their environments.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="rankmesh-cluster-"))
        ours = ("RANKMESH_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        own = {MARKER: "cluster", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._environment = {**inherited, **own, **variables}
        self._processes: list[ForkedProcess] = []
        self.url = self._start("rankmesh_gateway", r"ready at (https?://\S+)\n", "--port", "0")
        self._agents = 0

    def grow(self, size: int) -> None:
        """Have at least so many agents."""
        while self._agents < size:
            name = f"agent-{self._agents}"
            url = self._start(
                "rankmesh_agent", r"ready at (https?://\S+),", "--gateway", self.url, "--host", "127.0.0.1", "--port",
                "0", "--name", name,
            )  # fmt: skip
            wait_until(partial(self._is_ready, url), f"{name} to register", _START_SECONDS)
            self._agents += 1

    def _start(self, module: str, ready: str, *arguments: str) -> str:
        path = self._folder / f"{len(self._processes)}.out"
        path.touch()
        program = Python(["-m", module, *arguments], str(self._folder), forks=False)
        process = fork(program, 0, 0, self._environment, [os.devnull, str(path), str(path)])
        self._processes.append(process)
        end = time.monotonic() + _START_SECONDS
        while not (found := re.search(ready, path.read_text())):
            assert process.poll() is None, f"{module} ended: {path.read_text()}"
            assert time.monotonic() < end, f"{module} is not ready: {path.read_text()}"
            time.sleep(0.02)
        return found[1]

    def _is_ready(self, url: str) -> bool:
        command = [
            sys.executable,
            "-c",
            "import sys; from rankmesh.cli import main; sys.exit(main())",
            "get",
            f"{url}/readyz",
        ]
        asked = forked_python.run(command, cwd=self._folder, env=self._environment, timeout=_START_SECONDS)
        return bool(asked.returncode == 0)

    def transcript(self) -> str:
        """What all of them wrote."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self._folder.iterdir()))

    def close(self) -> None:
        """End all of them, and remove what they wrote."""
        for process in reversed(self._processes):
            process.terminate()
        for process in reversed(self._processes):
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._folder)


def over(medium: str, folder: Path, size: int) -> dict[str, str] | Callable[[int], dict[str, str]]:
    """Return the variables of ranks over a transport, attached to (its own) agents, or on hosts given by letters.

    Ranks with different RANKMESH_SHM_DIR share no memory, as if they were on several hosts.
    """
    if medium in ("attached", "agents"):
        return {GATEWAY: cluster({}, size, medium.removeprefix("attached")).url}
    if medium in ("shm", "tcp", "http"):
        return {"RANKMESH_TRANSPORT": medium.replace("http", "shm")}
    for host in set(medium):
        (folder / host).mkdir()
    return lambda rank: {"RANKMESH_SHM_DIR": str(folder / medium[rank])}


_clusters: dict[tuple[str, tuple[tuple[str, str], ...]], Cluster] = {}


def cluster(variables: Mapping[str, str], size: int, whose: str = "") -> Cluster:
    """Return a gateway with at least ``size`` agents whose environments have what of ``variables`` concerns them.

    Args:
        variables: of the ranks' environments.
        size: how many ranks.
        whose: of several clusters that are alike.
    """
    key = tuple(sorted((name, value) for name, value in variables.items() if name in _AGENTS))
    if (whose, key) not in _clusters:
        _clusters[whose, key] = Cluster(dict(key))
    found = _clusters[whose, key]
    found.grow(size)
    return found


def close_all() -> None:
    """End all clusters; to be called when the tests are over."""
    while _clusters:
        _clusters.popitem()[1].close()
