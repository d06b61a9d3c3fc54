"""Who is measured, and how each is started: by its own launcher, as its users start it."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Peer:
    """A library together with what it is told to do.

    Attributes:
        name: in files and on the command line.
        title: in words.
        short: the same where there is little room, as in tables and charts.
        library: key of ``worlds.JOIN``, or of what the program has in its place.
        module: what has to be importable.
        launcher: the command that starts ranks; ``{ranks}`` stands for how many.
        environment: variables to set.
        program: the module that ranks run.
    """

    name: str
    title: str
    short: str
    library: str
    module: str
    launcher: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    program: str = "benchmarks.rank"

    def command(self, ranks: int, *arguments: str) -> list[str]:
        """Return the command that starts so many ranks of ``python ARGUMENTS``."""
        return [word.format(ranks=ranks) for word in self.launcher] + list(arguments)

    def missing(self) -> str | None:
        """Return why this peer cannot be measured, None if it can."""
        if importlib.util.find_spec(self.module) is None:
            return f"the Python package {self.module} is not installed"
        if shutil.which(self.launcher[0]) is None:
            return f"the program {self.launcher[0]} is not installed"
        return None


def beside_python(program: str) -> str:
    """Return a program's path: from this environment if it is there, else its bare name, to be found on the PATH."""
    path = Path(sys.executable).parent / program
    return str(path) if path.exists() else program


RANKMESH = (sys.executable, "-m", "rankmesh.run", "--nproc-per-node={ranks}")
ATTACHED = (sys.executable, "-m", "benchmarks.attached", "{ranks}")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node={ranks}")
MPIRUN = (beside_python("mpirun"), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "{ranks}")

_SHM = {"RANKMESH_TRANSPORT": "shm"}

PEERS = {
    peer.name: peer
    for peer in (
        Peer("rankmesh-shm", "RankMesh, shared memory", "RankMesh shm", "rankmesh", "rankmesh", RANKMESH, _SHM),
        Peer(
            "rankmesh-registered",
            "RankMesh, registered arrays",
            "RankMesh registered",
            "registered",
            "rankmesh",
            RANKMESH,
            _SHM,
        ),
        Peer(
            "rankmesh-tcp",
            "RankMesh, TCP",
            "RankMesh TCP",
            "rankmesh",
            "rankmesh",
            RANKMESH,
            {"RANKMESH_TRANSPORT": "tcp"},
        ),
        Peer(
            "rankmesh-attached",
            "RankMesh, shared memory, attached to standalone agents",
            "RankMesh attached",
            "attached",
            "rankmesh",
            ATTACHED,
            _SHM,
        ),
        # torchrun looks after its ranks ten times a second, which would disturb the others' turns.
        Peer("gloo", "gloo", "gloo", "gloo", "torch", (*TORCHRUN, "--monitor-interval=5")),
        Peer("mpi", "Open MPI", "Open MPI", "mpi", "mpi4py", (*MPIRUN, sys.executable)),
    )
}


def available(peers: Iterable[Peer]) -> tuple[list[Peer], list[str]]:
    """Return the peers that can be measured here, and a line about each that cannot."""
    here, left_out = [], []
    for peer in peers:
        missing = peer.missing()
        if missing is None:
            here.append(peer)
        else:
            left_out.append(f"{peer.title} is left out: {missing}.")
    return here, left_out
