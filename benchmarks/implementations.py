"""The libraries compared, each with the launcher that its users start it with."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Implementation:
    """A library with its configuration: what it requires, what starts its ranks, the module that they run."""

    name: str
    title: str
    library: str
    requires: str
    launcher: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    program: str = "benchmarks.worker"
    arguments: tuple[str, ...] = ()

    def command(self, ranks: int, path: str) -> list[str]:
        """Return the command that starts ranks, which connect to the socket at ``path``."""
        program = ("-m", self.program, *self.arguments, self.library, path)
        return [word.format(ranks=ranks) for word in (*self.launcher, *program)]

    def missing(self) -> str | None:
        """Return the reason why this implementation cannot be measured here, None if it can."""
        if importlib.util.find_spec(self.requires) is None:
            return f"the Python package {self.requires} is not installed"
        if shutil.which(self.launcher[0]) is None:
            return f"the program {self.launcher[0]} is not installed"
        return None


def _program(name: str) -> str:
    """Return the path of a program of this environment, else its bare name."""
    path = Path(sys.executable).parent / name
    return str(path) if path.exists() else name


RANKMESH = (sys.executable, "-m", "rankmesh.run", "--nproc-per-node={ranks}")
ATTACHED = (sys.executable, "tests/support/attached_launcher.py", "{ranks}")
HOSTS = (sys.executable, "tests/support/network_hosts.py", "{ranks}")
# torchrun polls its ranks ten times a second by default, which would disturb the others' turns.
_STANDALONE = ("--standalone", "--nproc-per-node={ranks}", "--monitor-interval=5")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", *_STANDALONE)
_ANYWHERE = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none")
MPIRUN = (_program("mpirun"), *_ANYWHERE, "-n", "{ranks}", sys.executable)

_SHM, _TCP = {"RANKMESH_TRANSPORT": "shm"}, {"RANKMESH_TRANSPORT": "tcp"}
_PRIVATE = {"RANKMESH_PRIVATE_NETWORK": "1"}  # plain, as all that they are compared with

IMPLEMENTATIONS = {
    each.name: each
    for each in (
        Implementation("rankmesh-shm", "RankMesh shm", "rankmesh", "rankmesh", RANKMESH, _SHM),
        Implementation("rankmesh-registered", "RankMesh registered", "registered", "rankmesh", RANKMESH, _SHM),
        Implementation("rankmesh-tcp", "RankMesh TCP", "rankmesh", "rankmesh", RANKMESH, _TCP),
        Implementation("rankmesh-attached", "RankMesh attached", "attached", "rankmesh", ATTACHED, _SHM),
        Implementation("gloo", "gloo", "gloo", "torch", TORCHRUN),
        Implementation("mpi", "Open MPI", "mpi", "mpi4py", MPIRUN),
        # On demand alone:
        Implementation("rankmesh-mpi", "RankMesh over Open MPI", "rankmesh-mpi", "mpi4py", MPIRUN),
        Implementation("hosts", "RankMesh, two hosts", "rankmesh", "rankmesh", HOSTS, _PRIVATE),
        Implementation("hosts-tcp", "RankMesh, two hosts, TCP only", "rankmesh", "rankmesh", HOSTS, _TCP | _PRIVATE),
    )
}
COMPARED = tuple(IMPLEMENTATIONS)[:6]
"""The implementations of a full run."""


def available(wanted: Iterable[Implementation]) -> tuple[list[Implementation], list[str]]:
    """Return the implementations that can be measured here, and a line about each that cannot."""
    reasons = [(each, each.missing()) for each in wanted]
    here = [each for each, reason in reasons if reason is None]
    return here, [f"{each.title} is left out: {reason}." for each, reason in reasons if reason is not None]
