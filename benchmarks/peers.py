"""Who is measured, and how each is started: by its own launcher, as its users start it."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Peer:
    """A library together with what it is told to do.

    Attributes:
        name: in files and on the command line.
        title: in tables.
        library: key of ``worlds.JOIN``.
        module: what has to be importable.
        launcher: the command that starts ranks; ``{ranks}`` stands for how many.
        environment: variables to set.
    """

    name: str
    title: str
    library: str
    module: str
    launcher: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, ranks: int, *arguments: str) -> list[str]:
        """Return the command that starts so many ranks of ``python ARGUMENTS``."""
        return [word.format(ranks=ranks) for word in self.launcher] + list(arguments)

    def missing(self) -> str | None:
        """Return what has to be installed before this peer can be measured, None if nothing."""
        if importlib.util.find_spec(self.module) is None:
            return f"the Python package {self.module}"
        if shutil.which(self.launcher[0]) is None:
            return f"the program {self.launcher[0]}"
        return None


def beside_python(program: str) -> str:
    """Return a program's path: from this environment if it is there, else its bare name, to be found on the PATH."""
    path = Path(sys.executable).parent / program
    return str(path) if path.exists() else program


RANKMESH = (sys.executable, "-m", "rankmesh.run", "--nproc-per-node={ranks}")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node={ranks}")
MPIRUN = (beside_python("mpirun"), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "{ranks}")

PEERS = (
    Peer("rankmesh-shm", "RankMesh, shared memory", "rankmesh", "rankmesh", RANKMESH, {"RANKMESH_TRANSPORT": "shm"}),
    Peer("rankmesh-tcp", "RankMesh, TCP", "rankmesh", "rankmesh", RANKMESH, {"RANKMESH_TRANSPORT": "tcp"}),
    # torchrun looks after its ranks ten times a second, which would disturb the others' turns.
    Peer("gloo", "gloo", "gloo", "torch", (*TORCHRUN, "--monitor-interval=5")),
    Peer("mpi", "Open MPI", "mpi", "mpi4py", (*MPIRUN, sys.executable)),
)
