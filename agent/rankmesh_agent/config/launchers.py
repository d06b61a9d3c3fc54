"""Detection of the launcher (mpirun, mpiexec, srun, Kubernetes) from the variables that it sets in its processes.

The variables of one launcher belong together. If several launchers have set theirs, as mpirun does inside a Slurm job,
the innermost launcher applies: the first one in LAUNCHERS. RANK, which torchrun and ``rankmesh run`` set, has
precedence over all launchers; see Settings.

Sources: https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html,
https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES,
https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/; for MPICH the output of ``mpiexec -n 2 env``.
"""

from __future__ import annotations

import os
import re
import socket
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

from rankmesh_agent.config.env import describe_set, integer

LOOPBACK = "127.0.0.1"
FIRST_PORT, PORTS = 20_000, 9_000
"""Range of the ports derived from a job's number: below the kernels' ephemeral ports, 32768 and up."""
DEFAULT_PORT = 29_500
"""torchrun's port, for jobs without a number that all their processes know."""
_SPECIAL_STEPS = 0xFFFF_FFF0
"""First number (slurm.h) of the steps that srun does not start: an allocation's interactive shell, a batch script."""


@dataclass(frozen=True)
class Launcher(ABC):
    """A launcher, as one of its processes sees it.

    Attributes:
        rank: this process's rank, None if unknown.
        world_size: number of processes, None if unknown.
        local_rank: number of this process among those on its host, from 0.
        local_world_size: number of processes on its host.
        problem: reason why this process does not use the launcher's rank and world size, and the remedy; empty if it
            does. They are None then, unless only WORLD_SIZE differs.
    """

    name: ClassVar[str]
    """Name for users."""
    command: ClassVar[str]
    """Command with which users start their script."""
    token: ClassVar[str]
    """Instruction to give all processes a token."""
    address: ClassVar[str] = ""
    """Instruction to set the address of rank 0, if the launcher does not provide it."""

    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    problem: str = ""

    @classmethod
    @abstractmethod
    def detect(cls, environ: Mapping[str, str]) -> Self | None:
        """Return the launcher of this process, None if it did not start this process.

        Raises:
            ValueError: one of its variables is not a number.
        """

    @property
    def one_host(self) -> bool:
        """True if all processes are on this host."""
        return self.world_size is not None and self.world_size == self.local_world_size

    def job(self) -> str:
        """Return a unique name of this job, equal in all processes; empty if the processes have nothing in common."""
        return slug(f"{self.command}-{self._identity()}") if self._identity() else ""

    def host(self) -> str:
        """Return the host of rank 0, empty if the launcher does not provide it."""
        return LOOPBACK if self.one_host else self._first_host()

    def port(self) -> int:
        """Return the port on which rank 0 can host the gateway, equal in all processes."""
        return FIRST_PORT + self._number() % PORTS if self._identity() else DEFAULT_PORT

    def own_address(self) -> str:
        """Return the address to listen on, empty for the one that faces rank 0's host."""
        return ""

    def _identity(self) -> str:
        """Unique name of the job at this launcher."""
        return ""

    def _number(self) -> int:
        """Number that determines the job's port."""
        return zlib.crc32(self._identity().encode())

    def _first_host(self) -> str:
        return ""

    def validated(self, environ: Mapping[str, str], rank: str, world_size: str) -> Self:
        """Return the launcher, with a ``problem`` if its variables are inconsistent.

        Args:
            environ: the environment.
            rank: name of the variable with the rank.
            world_size: name of the variable with the world size.
        """
        found = describe_set(environ, rank, world_size)
        declared = integer(environ, "WORLD_SIZE", at_least=1)
        if self.rank is None or self.world_size is None:
            missing = rank if self.rank is None else world_size
            return self.without_rank(f"{self.name} started this process ({found}), but {missing} is missing")
        if self.rank >= self.world_size:
            return self.without_rank(f"{self.name} started this process ({found}): there is no such rank")
        if declared not in (None, self.world_size):
            problem = (
                f"WORLD_SIZE={declared}, but {self.name} started {self.world_size} processes ({found}): unset "
                "WORLD_SIZE, or start as many"
            )
            return replace(self, problem=problem)
        return self

    def without_rank(self, problem: str) -> Self:
        """Return the launcher without rank and world size, with a problem."""
        return replace(self, rank=None, world_size=None, problem=problem)


@dataclass(frozen=True)
class OpenMpi(Launcher):
    """Open MPI's mpirun, 4 and 5.

    Attributes:
        namespace: name of the job in its runtime.
    """

    name = "Open MPI"
    command = "mpirun"
    token = "export RANKMESH_TOKEN=$(openssl rand -hex 32), and start with 'mpirun -x RANKMESH_TOKEN …'"
    address = "start on the first host with 'mpirun -x MASTER_ADDR=$(hostname) -x RANKMESH_TOKEN …'"

    namespace: str = ""

    @classmethod
    def detect(cls, environ: Mapping[str, str]) -> Self | None:
        names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
        if not describe_set(environ, *names):
            return None
        return cls(
            rank=integer(environ, names[0]),
            world_size=integer(environ, names[1], at_least=1),
            local_rank=integer(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
            local_world_size=integer(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", at_least=1),
            namespace=environ.get("PMIX_NAMESPACE", ""),
        ).validated(environ, *names)

    def _identity(self) -> str:
        return self.namespace


@dataclass(frozen=True)
class Pmi(Launcher):
    """mpiexec of MPICH and its derivatives: Intel MPI, MVAPICH.

    The environment has no name for the job. On one host, the pid of the process that started all ranks identifies it.
    """

    name = "mpiexec (PMI)"
    command = "mpiexec"
    token = "export RANKMESH_TOKEN=$(openssl rand -hex 32) before 'mpiexec …'"
    address = "start on the first host, with 'mpiexec -genv MASTER_ADDR $(hostname) …'"

    @classmethod
    def detect(cls, environ: Mapping[str, str]) -> Self | None:
        names = ("PMI_RANK", "PMI_SIZE")
        if not describe_set(environ, *names) or _is_srun(environ):
            return None
        return cls(
            rank=integer(environ, names[0]),
            world_size=integer(environ, names[1], at_least=1),
            local_rank=integer(environ, "MPI_LOCALRANKID"),
            local_world_size=integer(environ, "MPI_LOCALNRANKS", at_least=1),
        ).validated(environ, *names)

    def _identity(self) -> str:
        return str(_launcher_pid("PMI_RANK")) if self.one_host else ""

    def _number(self) -> int:
        return int(self._identity())


@dataclass(frozen=True)
class Slurm(Launcher):
    """Slurm's srun.

    Attributes:
        job_id: the job's number.
        step: the number of this srun in the job, None for the process of a job with a single task, which needs no srun.
        nodes: the hosts of the step, in Slurm's format: ``n[01-03,7],m2``.
    """

    name = "Slurm"
    command = "srun"
    token = "write 'export RANKMESH_TOKEN=$(openssl rand -hex 32)' before srun, in the batch script or by hand"
    address = "export MASTER_ADDR, the first host of the step, before srun"

    job_id: int | None = None
    step: int | None = None
    nodes: str = ""

    @classmethod
    def detect(cls, environ: Mapping[str, str]) -> Self | None:
        job, step = integer(environ, "SLURM_JOB_ID"), integer(environ, "SLURM_STEP_ID")
        local_rank = integer(environ, "SLURM_LOCALID")
        world_size = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
        if job is None and not describe_set(environ, "SLURM_PROCID", world_size, "SLURM_LOCALID"):
            return None
        if step is None or step >= _SPECIAL_STEPS:
            if integer(environ, "SLURM_NTASKS") == 1 and environ.get("SLURM_PROCID"):
                task = cls(integer(environ, "SLURM_PROCID"), 1, local_rank, local_world_size=1, job_id=job)
                return task.validated(environ, "SLURM_PROCID", "SLURM_NTASKS")
            found = describe_set(environ, "SLURM_JOB_ID", "SLURM_PROCID", world_size, "SLURM_LOCALID")
            problem = (
                f"this process runs in a Slurm job ({found}), but not as a task of srun: start it with 'srun python …'"
            )
            return cls(local_rank=local_rank, problem=problem)
        return cls(
            rank=integer(environ, "SLURM_PROCID"),
            world_size=integer(environ, world_size, at_least=1),
            local_rank=local_rank,
            local_world_size=_tasks_on(integer(environ, "SLURM_NODEID"), environ.get("SLURM_STEP_TASKS_PER_NODE", "")),
            job_id=job,
            step=step,
            nodes=environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""),
        ).validated(environ, "SLURM_PROCID", world_size)

    def port(self) -> int:
        # A single task has no peers, and its job may run other tasks on the same host: any free port.
        return 0 if self.step is None else super().port()

    def _identity(self) -> str:
        return "" if self.job_id is None or self.step is None else f"{self.job_id}.{self.step}"

    def _number(self) -> int:
        # Concurrent jobs mostly have close numbers, and so do a job's steps: neither may share a port.
        return (self.job_id or 0) + 1000 * (self.step or 0)

    def _first_host(self) -> str:
        return first_host_in(self.nodes)


@dataclass(frozen=True)
class Kubernetes(Launcher):
    """An Indexed Job of Kubernetes, with one rank in each pod."""

    name = "Kubernetes"
    command = "kubectl"
    token = "give the pods RANKMESH_TOKEN out of a Secret"
    address = "give the pods a 'subdomain', the name of a headless Service"

    @classmethod
    def detect(cls, environ: Mapping[str, str]) -> Self | None:
        index = integer(environ, "JOB_COMPLETION_INDEX")
        if index is None:
            return None
        pod = cls(rank=index, world_size=integer(environ, "WORLD_SIZE", at_least=1), local_rank=0, local_world_size=1)
        if pod.world_size is None:
            return pod.without_rank(
                f"Kubernetes started this pod (JOB_COMPLETION_INDEX={index}), but does not provide their number: "
                "give the pods WORLD_SIZE, the same number as the Job's completions"
            )
        return pod.validated(environ, "JOB_COMPLETION_INDEX", "WORLD_SIZE")

    def own_address(self) -> str:
        # Not the address that faces the first pod: that pod has no name until it runs, which may take minutes.
        return _own_name_and_address()[1]

    def _first_host(self) -> str:
        return first_pod(_own_name_and_address()[0], self.rank)


LAUNCHERS: tuple[type[Launcher], ...] = (OpenMpi, Pmi, Slurm, Kubernetes)
"""All launchers, the innermost first."""


def detect_launcher(environ: Mapping[str, str]) -> Launcher | None:
    """Return the launcher that started a process with this environment as one of several, None if none did.

    Raises:
        ValueError: one of its variables is not a number.
    """
    return next((launcher for kind in LAUNCHERS if (launcher := kind.detect(environ)) is not None), None)


def first_host_in(nodes: str) -> str:
    """Return the first host of a list in Slurm's format: ``n01`` of ``n[01-03,7],m2``."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else ""


def first_pod(own_name: str, index: int | None) -> str:
    """Return the full name of an Indexed Job's first pod: ``train-0.mesh.default.svc.cluster.local`` of train-3's.

    The result is empty if the own name has no domain, as no other pod's name resolves then, or lacks the index.
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


def _launcher_pid(variable: str) -> int:
    """Return the pid of the closest ancestor without a variable in its environment: the launcher of this process.

    Shells between the two processes inherit the variable.
    """
    pid = os.getppid()
    while pid > 1:
        try:
            if f"\0{variable}=".encode() not in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
                break
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # another user's process, which is not between
            break
    return pid
