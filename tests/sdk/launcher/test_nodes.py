"""``rankmesh run --nnodes auto``: the nodes are what a launcher started."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankmesh._launcher.arguments import AUTO, parse
from rankmesh._launcher.plan import plan, resolve_nodes
from rankmesh_agent.config.settings import Settings

SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "10.0.0.[1-2]",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "RANKMESH_TOKEN": "secret",
    "RANKMESH_BIND": "127.0.0.1",
}


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").touch()
    return str(tmp_path / "train.py")


def job_of(script, environ, *arguments):
    settings = Settings.from_env(environ)
    options = parse(["--nnodes", "auto", "--nproc-per-node", "4", *arguments, script])
    return plan(resolve_nodes(options, settings), settings)


def test_nodes_of_srun(script):
    job = job_of(script, SRUN)
    assert (job.ranks, job.url, job.job) == (range(4, 8), "http://10.0.0.1:20007", "srun-7.0")
    assert job.environment(5, SRUN)["RANKMESH_BIND"] == "127.0.0.1"
    assert Settings.from_env(job.environment(5, SRUN)).launcher is None, "to the ranks we are the launcher"
    assert (job.environment(5, SRUN)["WORLD_SIZE"], job.environment(5, SRUN)["GROUP_RANK"]) == ("8", "1")


def test_what_is_said_stays(script):
    assert job_of(script, {**SRUN, "MASTER_ADDR": "10.0.0.9"}).url == "http://10.0.0.9:20007"
    assert job_of(script, {**SRUN, "MASTER_ADDR": "10.0.0.9"}, "--master-port", "5").url == "http://10.0.0.9:5"
    assert job_of(script, {**SRUN, "RANKMESH_JOB": "mine"}).job == "mine"
    assert job_of(script, SRUN, "--rdzv-id", "other").job == "other"


def test_one_node_is_as_without(script):
    job = job_of(script, {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"})
    assert job.owns_job
    assert job.port == 0


def test_a_world_size_is_of_ranks_and_not_compared_with_nodes(script):
    job = job_of(script, {**SRUN, "WORLD_SIZE": "8"})
    assert (job.ranks, job.environment(5, SRUN)["WORLD_SIZE"]) == (range(4, 8), "8")


def test_a_number_is_taken_whatever_the_environment_says(script):
    options = parse(["--nnodes", "1", script])
    assert resolve_nodes(options, Settings.from_env(SRUN)) is options


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({}, "neither srun, mpirun, mpiexec nor an Indexed Job of Kubernetes started this launcher"),
        ({"SLURM_JOB_ID": "7"}, "not as a task of srun"),
        ({**SRUN, "RANKMESH_TOKEN": ""}, "need a token"),
    ],
)
def test_what_is_missing_is_said(script, environ, says):
    with pytest.raises(ValueError, match=says):
        job_of(script, environ)


@pytest.mark.parametrize("option", ["--node-rank=1", "--master-addr=host1", "--rdzv-endpoint=host1:1"])
def test_what_it_finds_cannot_be_given(script, option, capsys):
    assert parse(["--nnodes", "auto", script]).nnodes == AUTO
    with pytest.raises(SystemExit):
        parse(["--nnodes", "auto", option, script])
    assert "--nnodes auto finds --node-rank and --master-addr" in capsys.readouterr().err
