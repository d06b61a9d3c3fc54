"""What launchers leave in the environment, and what is made of it. The variables are those that were seen to be set."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rankmesh_agent.config.launchers import (
    DEFAULT_PORT,
    FIRST_PORT,
    KUBERNETES,
    OPEN_MPI,
    PMI,
    PORTS,
    SLURM,
    detect_launcher,
    first_host_in,
    first_pod,
    started_with_ulfm,
)
from rankmesh_agent.config.settings import Settings


def env(text: str, base: dict[str, str] | None = None) -> dict[str, str]:
    return (base or {}) | dict(variable.split("=", 1) for variable in text.split())


MPIRUN = env(
    "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 "
    "PMIX_NAMESPACE=prterun-vm-28285@1 PMIX_RANK=3"
)
MPICH = env("PMI_RANK=3 PMI_SIZE=4 PMI_FD=6 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2")
SALLOC = env("SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n[1-2] SLURM_NTASKS=8 SLURM_TASKS_PER_NODE=4(x2)")
BATCH_SCRIPT = env("SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_PROCID=0", SALLOC)
INTERACTIVE_STEP = env(
    "SLURM_PROCID=0 SLURM_STEP_ID=4294967290 SLURM_STEP_NODELIST=n1 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1",
    SALLOC,
)
SINGLE_TASK = env("SLURM_JOB_NODELIST=n1 SLURM_NTASKS=1 SLURM_TASKS_PER_NODE=1", BATCH_SCRIPT)
SRUN = env(
    "SLURM_NODEID=1 SLURM_NTASKS=3 SLURM_PROCID=2 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_NUM_TASKS=3 "
    "SLURM_STEP_TASKS_PER_NODE=2,1",
    BATCH_SCRIPT,
)
PMI2 = env("PMI_RANK=2 PMI_SIZE=3 PMI_JOBID=7.0 PMI_FD=13", SRUN)
DAEMON = env("SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_ID=1", SRUN)
"""An MPI's own process on the second node, which srun starts there to start ranks."""
POD = env("JOB_COMPLETION_INDEX=3 WORLD_SIZE=4 KUBERNETES_SERVICE_HOST=10.96.0.1")

STARTED = {
    "Open MPI": (MPIRUN, OPEN_MPI, (3, 4, 1, 2)),
    "Open MPI in a Slurm job": ({**DAEMON, **MPIRUN}, OPEN_MPI, (3, 4, 1, 2)),
    "Open MPI beside PMI": ({**MPICH, **MPIRUN, "PMI_RANK": "0"}, OPEN_MPI, (3, 4, 1, 2)),
    "Open MPI in a pod": ({**POD, **MPIRUN}, OPEN_MPI, (3, 4, 1, 2)),
    "MPICH": (MPICH, PMI, (3, 4, 1, 2)),
    "MPICH in a batch script": ({**BATCH_SCRIPT, **MPICH}, PMI, (3, 4, 1, 2)),
    "MPICH in a Slurm job": ({**DAEMON, **MPICH}, PMI, (3, 4, 1, 2)),
    "MPICH in a shell of srun --mpi=pmi2": ({**PMI2, **MPICH, "PMI_RANK": "2", "PMI_SIZE": "3"}, PMI, (2, 3, 1, 2)),
    "srun": (SRUN, SLURM, (2, 3, 0, 1)),
    "srun --mpi=pmi2": (PMI2, SLURM, (2, 3, 0, 1)),
    "srun --mpi=pmix": ({**SRUN, "PMIX_RANK": "2", "PMIX_NAMESPACE": "slurm.pmix.7.0"}, SLURM, (2, 3, 0, 1)),
    "a batch script of one task": (SINGLE_TASK, SLURM, (0, 1, 0, 1)),
    "salloc -n 1 on its node": ({**INTERACTIVE_STEP, "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}, SLURM, (0, 1, 0, 1)),
    "MPICH in a batch script of one task": ({**SINGLE_TASK, **MPICH}, PMI, (3, 4, 1, 2)),
    "Slurm in a pod": ({**POD, **SRUN, "WORLD_SIZE": "3"}, SLURM, (2, 3, 0, 1)),
    "Kubernetes": (POD, KUBERNETES, (3, 4, 0, 1)),
}


@pytest.mark.parametrize(("environ", "kind", "numbers"), STARTED.values(), ids=STARTED)
def test_the_innermost_launcher_counts(environ, kind, numbers):
    there = detect_launcher(environ)
    assert there.kind is kind
    assert (there.rank, there.world_size, there.local_rank, there.local_world_size) == numbers
    assert not there.problem
    settings = Settings.from_env(environ)
    assert (settings.rank, settings.world_size, settings.local_rank) == numbers[:3]
    assert settings.launcher == there
    assert settings.job == Settings.job, "it is the rendezvous that takes the launcher's, if it takes its rank"


@pytest.mark.parametrize("environ", [MPIRUN, MPICH, SRUN, POD, BATCH_SCRIPT, SINGLE_TASK, SALLOC])
def test_who_sets_the_rank_comes_before_all(environ):
    """torchrun, rankmesh run, or a person inside of what a launcher started."""
    ours = {"RANK": "1", "WORLD_SIZE": "2"}
    assert Settings.from_env({**environ, **ours}) == Settings(rank=1, world_size=2)
    assert Settings.from_env({**environ, **ours, "LOCAL_RANK": "0"}).local_rank == 0


@pytest.mark.parametrize(("environ", "kind", "numbers"), STARTED.values(), ids=STARTED)
def test_who_sets_the_rank_that_the_launcher_gave_gets_the_rest_from_it(environ, kind, numbers):
    """``export RANK=$SLURM_PROCID``, with or without WORLD_SIZE."""
    rank, world_size, local_rank, _ = numbers
    expected = Settings(rank=rank, world_size=world_size, local_rank=local_rank)
    assert Settings.from_env({**environ, "RANK": str(rank)}) == expected, "the launcher does not say where rank 0 is"
    assert Settings.from_env({**environ, "RANK": str(rank), "WORLD_SIZE": str(world_size)}) == expected
    other = {"RANK": str(rank), "WORLD_SIZE": "9"}
    if kind is not KUBERNETES:  # which has no world size of its own
        assert Settings.from_env({**environ, **other}) == Settings(rank=rank, world_size=9), "of another world"
    own = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "7"}
    assert Settings.from_env({**environ, **own}).local_rank == 7


def test_who_sets_the_rank_does_not_trip_over_what_a_launcher_left():
    left = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "none", "PMI_RANK": "x", "OMPI_COMM_WORLD_SIZE": "0"}
    assert Settings.from_env({**left, "RANK": "1"}) == Settings(rank=1)
    with pytest.raises(ValueError, match=r"^OMPI_COMM_WORLD_SIZE="):
        Settings.from_env(left)


def test_nothing_of_a_launcher_is_none():
    assert detect_launcher({}) is None
    assert detect_launcher(dict.fromkeys([*MPIRUN, *MPICH, *SRUN, *POD], "")) is None, "empty is as good as absent"
    assert detect_launcher({"WORLD_SIZE": "4", "KUBERNETES_SERVICE_HOST": "10.96.0.1", "PMIX_RANK": "0"}) is None


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


WRONG = {
    "Open MPI, no rank": (
        without(MPIRUN, "OMPI_COMM_WORLD_RANK"),
        "Open MPI started this process (OMPI_COMM_WORLD_SIZE=4), but OMPI_COMM_WORLD_RANK is missing",
    ),
    "Open MPI, no size": (without(MPIRUN, "OMPI_COMM_WORLD_SIZE"), "but OMPI_COMM_WORLD_SIZE is missing"),
    "PMI, no size": (without(MPICH, "PMI_SIZE"), "started this process (PMI_RANK=3), but PMI_SIZE is missing"),
    "srun, no size": (without(SRUN, "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"), "2), but SLURM_NTASKS is missing"),
    "srun, no rank": (without(SRUN, "SLURM_PROCID"), "(SLURM_STEP_NUM_TASKS=3), but SLURM_PROCID is missing"),
    "batch script": (BATCH_SCRIPT, "(SLURM_JOB_ID=7, SLURM_PROCID=0, SLURM_NTASKS=8, SLURM_LOCALID=0), but not"),
    "salloc": (SALLOC, "runs in a Slurm job (SLURM_JOB_ID=7, SLURM_NTASKS=8), but not as a task of srun"),
    "salloc on the first node": (INTERACTIVE_STEP, "but not as a task of srun: start it with 'srun python …'"),
    "a pod of how many": (without(POD, "WORLD_SIZE"), "(JOB_COMPLETION_INDEX=3), but does not provide their number"),
    "more than there are": (
        {**POD, "WORLD_SIZE": "3"},
        "(JOB_COMPLETION_INDEX=3, WORLD_SIZE=3): there is no such rank",
    ),
    "salloc -n 1": (without(SINGLE_TASK, "SLURM_PROCID"), "but not as a task of srun"),
    "one task, no such rank": ({**SINGLE_TASK, "SLURM_PROCID": "1"}, "SLURM_NTASKS=1): there is no such rank"),
}


@pytest.mark.parametrize(("environ", "says"), WRONG.values(), ids=WRONG)
def test_half_of_a_set_is_no_rank_and_said_in_words(environ, says):
    there = detect_launcher(environ)
    assert says in there.problem
    assert (there.rank, there.world_size) == (None, None)
    assert Settings.from_env(environ).rank is None


def test_another_world_size_is_said_and_what_the_launcher_says_is_kept():
    """It may have started nodes, and WORLD_SIZE be of their ranks: nodes.py."""
    environ = {**SRUN, "WORLD_SIZE": "8"}
    there = detect_launcher(environ)
    assert (there.rank, there.world_size) == (2, 3)
    says = "WORLD_SIZE=8, but Slurm started 3 processes (SLURM_PROCID=2, SLURM_STEP_NUM_TASKS=3): unset WORLD_SIZE"
    assert says in there.problem
    settings = Settings.from_env(environ)
    assert (settings.rank, settings.world_size) == (None, 8)


def test_the_same_world_size_twice_is_fine():
    assert detect_launcher({**SRUN, "WORLD_SIZE": "3"}) == detect_launcher(SRUN)


# Where rank 0 is, on which port, and the job's name

ONE_HOST = {
    "Open MPI": {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
    "MPICH": {**MPICH, "MPI_LOCALNRANKS": "4"},
    "Slurm": {**SRUN, "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "3"},
    "Slurm, a single task": SINGLE_TASK,
    "Kubernetes": {**POD, "JOB_COMPLETION_INDEX": "0", "WORLD_SIZE": "1"},
}


@pytest.mark.parametrize("environ", ONE_HOST.values(), ids=ONE_HOST)
def test_on_one_host_they_meet_on_loopback(environ):
    there = detect_launcher(environ)
    assert there.one_host
    assert there.host() == "127.0.0.1"


@pytest.mark.parametrize(
    ("environ", "host", "port", "job"),
    [
        (SRUN, "n1", FIRST_PORT + 7, "srun-7.0"),
        ({**SRUN, "SLURM_STEP_ID": "2"}, "n1", FIRST_PORT + 2007, "srun-7.2"),
        ({**SRUN, "SLURM_JOB_ID": "1234567"}, "n1", FIRST_PORT + 1234567 % PORTS, "srun-1234567.0"),
        ({**SRUN, "SLURM_STEP_NODELIST": "n2"}, "n2", FIRST_PORT + 7, "srun-7.0"),
        (without(SRUN, "SLURM_STEP_NODELIST"), "n1", FIRST_PORT + 7, "srun-7.0"),
        (SINGLE_TASK, "127.0.0.1", 0, ""),
        (without(SRUN, "SLURM_JOB_ID"), "n1", DEFAULT_PORT, ""),
        (MPIRUN, "", 21530, "mpirun-prterun-vm-28285-1"),
        (without(MPIRUN, "PMIX_NAMESPACE"), "", DEFAULT_PORT, ""),
        (MPICH, "", DEFAULT_PORT, ""),
    ],
)
def test_where_they_meet(environ, host, port, job):
    there = detect_launcher(environ)
    assert (there.host(), there.port(), there.job()) == (host, port, job)


def test_ports_are_not_those_that_kernels_give_away():
    ports = {detect_launcher({**SRUN, "SLURM_JOB_ID": str(job)}).port() for job in range(0, 100_000, 7)}
    assert min(ports) >= FIRST_PORT
    assert max(ports) < FIRST_PORT + PORTS <= DEFAULT_PORT < 32768


def test_jobs_that_run_at_a_time_have_ports_of_their_own():
    def port(job, step=0):
        return detect_launcher({**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).port()

    assert len({port(8990 + job) for job in range(900)}) == 900
    assert len({port(8990 + job, step) for job in range(100) for step in range(9)}) == 900


def test_mpiexec_is_told_by_its_process_whatever_is_between():
    """All ranks of a job on a host have the same name for it, a shell in between or not; the next job another."""
    code = (
        "import os; from rankmesh_agent.config.launchers import detect_launcher; there = detect_launcher(os.environ);"
        "print(there.job(), there.port())"
    )
    here = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI_", "SLURM_"))}
    starter = """
        echo $$
        PMI_RANK=0 MPI_LOCALRANKID=0 "$PYTHON" -c "$CODE"
        PMI_RANK=1 MPI_LOCALRANKID=1 sh -c '"$PYTHON" -c "$CODE"; true'
        true
    """
    own = {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "PYTHON": sys.executable, "CODE": code}
    shell = ["sh", "-ec", starter]
    reported = subprocess.run(shell, env={**here, **own}, capture_output=True, text=True, check=True, timeout=60).stdout
    pid, *ranks = reported.split()
    assert ranks == [f"mpiexec-{pid}", str(FIRST_PORT + int(pid) % PORTS)] * 2


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-2]", "n1"),
        ("n[01-03,7],m2", "n01"),
        ("n[7,9-11]", "n7"),
        ("m2,n[01-03]", "m2"),
        ("rack[0-1]-node[02-04],login", "rack0-node02"),
        ("gpu-a[3]", "gpu-a3"),
        ("n[1-2].cluster,x", "n1.cluster"),
        ("10-0-0-1,10-0-0-2", "10-0-0-1"),
        ("", ""),
    ],
)
def test_the_first_of_slurms_nodes(nodes, first):
    assert first_host_in(nodes) == first


@pytest.mark.parametrize(
    ("name", "index", "first"),
    [
        ("train-3.mesh.default.svc.cluster.local", 3, "train-0.mesh.default.svc.cluster.local"),
        ("my-train-12.mesh.default.svc.cluster.local", 12, "my-train-0.mesh.default.svc.cluster.local"),
        ("train-0.mesh", 0, "train-0.mesh"),
        ("train-3", 3, ""),
        ("node-7.example", 3, ""),
        ("", 3, ""),
    ],
)
def test_the_first_pod(name, index, first):
    assert first_pod(name, index) == first


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("true", True), ("0", False), ("false", False)])
def test_ulfm(value: str, expected: bool) -> None:
    assert started_with_ulfm({"OMPI_MCA_mpi_ft_enable": value}) is expected
    assert not started_with_ulfm({})
