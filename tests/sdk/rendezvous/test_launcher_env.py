"""Where the processes of a launcher meet: what it says, what MASTER_ADDR and MASTER_PORT say, what is missing."""

from __future__ import annotations

import pytest
from support.processes import free_port

from rankmesh._rendezvous import locator, resolve_init_method
from rankmesh._rendezvous.locator import with_master_address
from rankmesh_agent.config import launchers
from rankmesh_agent.config.settings import Settings

SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "10.0.0.[1-2]",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}
ONE_NODE = {**SRUN, "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "10.0.0.1", "SLURM_STEP_TASKS_PER_NODE": "3"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "PMIX_NAMESPACE": "prterun-vm-1@1",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "1"}
POD = {"JOB_COMPLETION_INDEX": "3", "WORLD_SIZE": "4"}
OURS = {"RANKMESH_TOKEN": "secret", "RANKMESH_BIND": "127.0.0.1"}


def place(environ):
    settings = Settings.from_env(environ)
    there = with_master_address(settings, settings.launcher)
    return there.master_addr, there.master_port, there.bind


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (ONE_NODE, ("127.0.0.1", 20007, None)),
        ({**ONE_NODE, "MASTER_PORT": "1234"}, ("127.0.0.1", 1234, None)),
        ({**SRUN, **OURS}, ("10.0.0.1", 20007, "127.0.0.1")),
        ({**SRUN, **OURS, "MASTER_ADDR": "10.0.0.9"}, ("10.0.0.9", 20007, "127.0.0.1")),
        ({**SRUN, **OURS, "MASTER_PORT": "0"}, ("10.0.0.1", 0, "127.0.0.1")),
        ({**SRUN, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}, ("127.0.0.1", 1234, None)),
        ({**OPEN_MPI, **OURS, "MASTER_ADDR": "10.0.0.9"}, ("10.0.0.9", 25453, "127.0.0.1")),
        ({**PMI, **OURS, "MASTER_ADDR": "10.0.0.9"}, ("10.0.0.9", 29500, "127.0.0.1")),
        ({**POD, **OURS, "MASTER_ADDR": "train-0.mesh"}, ("train-0.mesh", 29500, "127.0.0.1")),
    ],
)
def test_what_is_set_comes_before_what_the_launcher_says(environ, expected):
    assert place(environ) == expected


WRONG = {
    "Open MPI, several hosts": (
        OPEN_MPI,
        "where rank 0 is: start on the first host with 'mpirun -x MASTER",
    ),
    "PMI, several hosts": (
        PMI,
        "where rank 0 is: start on the first host, with 'mpiexec -genv MASTER",
    ),
    "Slurm, no token": (SRUN, r"meet at 10.0.0.1, .* need a token.* write 'export RANKMESH_TOKEN=\$\(openssl rand"),
    "Kubernetes, no token": ({**POD, "MASTER_ADDR": "train-0.mesh"}, "need a token.* RANKMESH_TOKEN out of a Secret"),
}


@pytest.mark.parametrize(("environ", "says"), WRONG.values(), ids=WRONG)
def test_what_is_missing_is_said(environ, says):
    with pytest.raises(ValueError, match=says):
        place(environ)


def test_pods_without_a_service_have_no_names(monkeypatch):
    monkeypatch.setattr(launchers, "_own_name_and_address", lambda: ("train-3", "10.0.0.3"))
    with pytest.raises(ValueError, match="give the pods a 'subdomain', the name of a headless Service"):
        place({**POD, **OURS})


def test_pods_listen_on_their_own_address(monkeypatch):
    own = ("train-3.mesh.default.svc.cluster.local", "10.0.0.3")
    monkeypatch.setattr(launchers, "_own_name_and_address", lambda: own)
    first = "train-0.mesh.default.svc.cluster.local"  # which has no address here: nobody asked for it
    assert place({**POD, "RANKMESH_TOKEN": "secret"}) == (first, 29500, "10.0.0.3")


def test_a_name_that_stands_for_loopback_on_its_own_host_is_refused(monkeypatch):
    """As Debian's /etc/hosts has it; other hosts would wait for rank 0 until their deadline."""
    monkeypatch.setattr(locator, "address_towards", lambda host, port: "127.0.1.1")
    with pytest.raises(ValueError, match=r"10.0.0.1, where rank 0 is, stands for 127.0.1.1 .* set MASTER_ADDR to an"):
        place({**SRUN, "RANKMESH_TOKEN": "secret"})


# The rendezvous as a whole


def job_of(environ, **given):
    met = resolve_init_method("env://", given.get("rank", -1), given.get("world_size", -1), Settings.from_env(environ))
    met.close()
    return met.rank, met.world_size, met.job, met.find()


def test_plain_env_takes_all_from_the_launcher():
    assert job_of(ONE_NODE) == (2, 3, "srun-7.0", "http://127.0.0.1:20007")
    assert job_of({**ONE_NODE, "RANKMESH_JOB": "mine"})[2] == "mine"


def test_a_gateway_that_runs_is_told_the_launchers_job():
    gateway = {"RANKMESH_GATEWAY": "http://127.0.0.1:8700"}
    assert job_of({**SRUN, **gateway}) == (2, 3, "srun-7.0", "http://127.0.0.1:8700")


def test_a_rank_that_the_program_gives_is_not_the_launchers():
    """Its ranks may be those of several launchers, or in another order: then rank 0 would be elsewhere."""
    with pytest.raises(ValueError, match="env:// needs MASTER_PORT"):
        job_of(ONE_NODE, rank=2, world_size=3)
    port = free_port()
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    assert job_of({**ONE_NODE, **own}, rank=1, world_size=3) == (1, 3, "default", f"http://127.0.0.1:{port}")
    assert job_of({**ONE_NODE, **own})[:3] == (2, 3, "srun-7.0")


def test_the_error_says_who_is_understood():
    with pytest.raises(ValueError, match="set RANK, or start with what sets it: 'rankmesh run', torchrun, srun"):
        job_of({})
    with pytest.raises(ValueError, match=r"rank is not known: Open MPI started this process .*_RANK is missing"):
        job_of({"OMPI_COMM_WORLD_SIZE": "2"})
