"""Detection of the launcher (mpirun, mpiexec, srun, Kubernetes) from the variables that it sets in its processes.

The variables of one launcher belong together. If several launchers have set theirs, as mpirun does inside a Slurm job,
the innermost launcher applies: Open MPI, PMI, Slurm, Kubernetes, in this order. RANK, which torchrun and
``rankmesh run`` set, has precedence over all launchers; see Settings.

Sources: https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html,
https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES,
https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/; for MPICH the output of ``mpiexec -n 2 env``.
"""

from __future__ import annotations

import os
import re
import socket
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rankmesh_agent.config.env import describe_set, integer

LOOPBACK = "127.0.0.1"
FIRST_PORT, PORTS = 20_000, 9_000
"""Range of the ports derived from a job's number: below the kernels' ephemeral ports, 32768 and up."""
DEFAULT_PORT = 29_500
"""torchrun's port, for jobs without a number that all their processes know."""
_SPECIAL_STEPS = 0xFFFF_FFF0
"""First number (slurm.h) of the steps that srun does not start: an allocation's interactive shell, a batch script."""


class LauncherKind(NamedTuple):
    """A kind of launcher.

    Attributes:
        name, command: name for users, and the command with which they start their script.
        token: instruction to give all processes a token.
        address: instruction to set the address of rank 0, if the launcher does not provide it.
        rank, world_size, local_rank, local_world_size: variables with a process's numbers.
    """

    name: str
    command: str
    token: str
    address: str
    rank: str
    world_size: str
    local_rank: str = ""
    local_world_size: str = ""


OPEN_MPI = LauncherKind(
    "Open MPI",
    "mpirun",
    "export RANKMESH_TOKEN=$(openssl rand -hex 32), and start with 'mpirun -x RANKMESH_TOKEN …'",
    "start on the first host with 'mpirun -x MASTER_ADDR=$(hostname) -x RANKMESH_TOKEN …'",
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)
PMI = LauncherKind(
    "mpiexec (PMI)",
    "mpiexec",
    "export RANKMESH_TOKEN=$(openssl rand -hex 32) before 'mpiexec …'",
    "start on the first host, with 'mpiexec -genv MASTER_ADDR $(hostname) …'",
    *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""mpiexec of MPICH and its derivatives: Intel MPI, MVAPICH. On one host, its pid identifies the job."""
SLURM = LauncherKind(
    "Slurm",
    "srun",
    "write 'export RANKMESH_TOKEN=$(openssl rand -hex 32)' before srun, in the batch script or by hand",
    "export MASTER_ADDR, the first host of the step, before srun",
    *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
"""Slurm's srun; a job with a single task needs none."""
KUBERNETES = LauncherKind(
    "Kubernetes",
    "kubectl",
    "give the pods RANKMESH_TOKEN out of a Secret",
    "give the pods a 'subdomain', the name of a headless Service",
    *("JOB_COMPLETION_INDEX", "WORLD_SIZE"),
)
"""An Indexed Job of Kubernetes, with one rank in each pod."""


@dataclass(frozen=True)
class Launcher:
    """A launcher, as one of its processes sees it.

    Attributes:
        rank, world_size: this process's rank, and the number of processes; None if unknown.
        local_rank, local_world_size: the same among the processes on its host.
        problem: reason why this process does not use the launcher's rank and world size, and the remedy; empty if it
            does. They are None then, unless only WORLD_SIZE differs.
        identity: unique name of the job at this launcher, equal in all processes; empty if they have none in common.
        number: number that determines the job's port.
        nodes: the hosts, in Slurm's format: ``n[01-03,7],m2``.
        default_port: port of a job without an identity.
    """

    kind: LauncherKind
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    problem: str = ""
    identity: str = ""
    number: int = 0
    nodes: str = ""
    default_port: int = DEFAULT_PORT

    @property
    def one_host(self) -> bool:
        """True if all processes are on this host."""
        return self.world_size is not None and self.world_size == self.local_world_size

    def job(self) -> str:
        """Return a unique name of this job, equal in all processes; empty if the processes have nothing in common."""
        return slug(f"{self.kind.command}-{self.identity}") if self.identity else ""

    def host(self) -> str:
        """Return the host of rank 0, empty if the launcher does not provide it."""
        if self.one_host:
            return LOOPBACK
        if self.kind is KUBERNETES:
            return first_pod(_own_name_and_address()[0], self.rank)
        return first_host_in(self.nodes)

    def port(self) -> int:
        """Return the port on which rank 0 can host the gateway, equal in all processes."""
        return FIRST_PORT + self.number % PORTS if self.identity else self.default_port

    def own_address(self) -> str:
        """Return the address to listen on, empty for the one that faces rank 0's host."""
        # Of a pod not the address that faces the first one: that has no name until it runs, which may take minutes.
        return _own_name_and_address()[1] if self.kind is KUBERNETES else ""


def detect_launcher(environ: Mapping[str, str]) -> Launcher | None:
    """Return the launcher that started a process with this environment as one of several, None if none did."""
    if describe_set(environ, OPEN_MPI.rank, OPEN_MPI.world_size):
        namespace = environ.get("PMIX_NAMESPACE", "")
        return _read(OPEN_MPI, environ, identity=namespace, number=zlib.crc32(namespace.encode()))
    if describe_set(environ, PMI.rank, PMI.world_size) and not _is_srun(environ):
        found = _read(PMI, environ)
        pid = _launcher_pid(PMI.rank) if found.one_host else 0
        return replace(found, identity=str(pid or ""), number=pid)
    return _detect_slurm(environ) or _detect_pod(environ)


def started_with_ulfm(environ: Mapping[str, str]) -> bool:
    """Return whether Open MPI goes on after the death of a rank, as ``mpirun --with-ft ulfm`` directs."""
    return environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true")


def _detect_slurm(environ: Mapping[str, str]) -> Launcher | None:
    job, step = integer(environ, "SLURM_JOB_ID"), integer(environ, "SLURM_STEP_ID")
    local_rank = integer(environ, SLURM.local_rank)
    size = SLURM.world_size if environ.get(SLURM.world_size) else "SLURM_NTASKS"
    if job is None and not describe_set(environ, SLURM.rank, size, SLURM.local_rank):
        return None
    if step is not None and step < _SPECIAL_STEPS:
        return _read(
            SLURM,
            environ,
            size,
            local_world_size=_tasks_on(integer(environ, "SLURM_NODEID"), environ.get("SLURM_STEP_TASKS_PER_NODE", "")),
            identity="" if job is None else f"{job}.{step}",
            # Concurrent jobs mostly have close numbers, and so do a job's steps: neither may share a port.
            number=(job or 0) + 1000 * step,
            nodes=environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""),
        )
    if integer(environ, "SLURM_NTASKS") == 1 and environ.get(SLURM.rank):
        # It has no peers, and its job may run other tasks on the same host: any free port.
        return _read(SLURM, environ, "SLURM_NTASKS", local_world_size=1, default_port=0)
    found = describe_set(environ, "SLURM_JOB_ID", SLURM.rank, size, SLURM.local_rank)
    problem = f"this process runs in a Slurm job ({found}), but not as a task of srun: start it with 'srun python …'"
    return Launcher(SLURM, local_rank=local_rank, problem=problem)


def _detect_pod(environ: Mapping[str, str]) -> Launcher | None:
    index = integer(environ, KUBERNETES.rank)
    if index is None or environ.get("WORLD_SIZE"):
        return None if index is None else _read(KUBERNETES, environ, local_rank=0, local_world_size=1)
    problem = (
        f"Kubernetes started this pod (JOB_COMPLETION_INDEX={index}), but does not provide their number: "
        "give the pods WORLD_SIZE, the same number as the Job's completions"
    )
    return Launcher(KUBERNETES, local_rank=0, local_world_size=1, problem=problem)


def _read(kind: LauncherKind, environ: Mapping[str, str], size: str = "", **known: Any) -> Launcher:
    """Return the launcher, with a ``problem`` if its variables are inconsistent; ``known`` are further attributes."""
    size = size or kind.world_size
    rank, world_size = integer(environ, kind.rank), integer(environ, size, at_least=1)
    local_rank, local_size = integer(environ, kind.local_rank), integer(environ, kind.local_world_size, at_least=1)
    numbers = {"local_rank": local_rank, "local_world_size": local_size, **known}
    declared, found = integer(environ, "WORLD_SIZE", at_least=1), describe_set(environ, kind.rank, size)
    if rank is None or world_size is None or rank >= world_size:
        missing = kind.rank if rank is None else size if world_size is None else ""
        why = f", but {missing} is missing" if missing else ": there is no such rank"
        return Launcher(kind, problem=f"{kind.name} started this process ({found}){why}", **numbers)
    problem = (
        f"WORLD_SIZE={declared}, but {kind.name} started {world_size} processes ({found}): unset WORLD_SIZE, or start "
        "as many"
    )
    return Launcher(kind, rank, world_size, problem=problem if declared not in (None, world_size) else "", **numbers)


def first_host_in(nodes: str) -> str:
    """Return the first host of a list in Slurm's format: ``n01`` of ``n[01-03,7],m2``."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else ""


def first_pod(own_name: str, index: int | None) -> str:
    """Return the full name of an Indexed Job's first pod, ``train-0.mesh.default.svc.cluster.local`` of train-3's.

    It is empty if the own name has no domain, or lacks the index.
    """
    name, _, domain = own_name.partition(".")
    stem, dash, end = name.rpartition("-")
    return f"{stem}-0.{domain}" if domain and dash and end == str(index) else ""


def slug(text: str) -> str:
    """Return the text with all characters replaced that are not safe in file names and URLs."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)


def _own_name_and_address() -> tuple[str, str]:
    """Return this host's full name and its address from /etc/hosts; empty if there are none."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM, flags=socket.AI_CANONNAME)
    except OSError:
        return "", ""
    return found[0][3], str(found[0][4][0])


def _is_srun(environ: Mapping[str, str]) -> bool:
    """Return whether srun set PMI_RANK, as ``srun --mpi=pmi2`` does, and not an mpiexec inside its step."""
    pairs = (("PMI_RANK", "SLURM_PROCID"), ("PMI_SIZE", "SLURM_STEP_NUM_TASKS"), ("MPI_LOCALRANKID", ""))
    return bool(environ.get("SLURM_STEP_ID")) and all(environ.get(mpi) == environ.get(slurm) for mpi, slurm in pairs)


def _tasks_on(node: int | None, tasks: str) -> int | None:
    """Return the number of tasks on a node: 2 for node 1 of ``2(x2),1``."""
    if node is None:
        return None
    for count, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
        node -= int(nodes or 1)
        if node < 0:
            return int(count)
    return None


def ancestors() -> Iterator[int]:
    """Yield the process ids of this process's ancestors, its parent first."""
    pid = os.getppid()
    while pid > 1:
        yield pid
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended, or belongs to another user
            return


def _launcher_pid(variable: str) -> int:
    """Return the pid of the closest ancestor without a variable that a launcher sets, and shells inherit."""
    for pid in ancestors():
        try:
            if f"\0{variable}=".encode() not in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
                return pid
        except OSError:  # another user's process, which is not between
            return pid
    return min(os.getppid(), 1)  # it is the first process of a container, or outside it
