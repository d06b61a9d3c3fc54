"""How ranks of backend "mpi" find each other, and what they are told where they cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from support.mpi import MpiRun, files_in, on_mpi, run
from support.once import Reports, once
from support.processes import Me, Ranks, free_port

import rankmesh as dist


def every_way(me: Me, port: int) -> None:
    """Start, and end, again and again; what is refused is so at both ranks."""
    from rankmesh._session.session import current

    def start(name, variables=(), **options):
        os.environ.update(variables)
        told = me.attempt(dist.init_process_group, "mpi", timeout=30, **options)
        if dist.is_initialized():
            array = np.ones(2)
            dist.all_reduce(array)
            told.update(sum=array.tolist(), token=current().agent.settings.token)
            dist.destroy_process_group()
        for variable in variables:
            del os.environ[variable]
        me.report(**{name: told})

    def only(at, **what):
        return what if me.rank == at else {}

    method = f"file://{me.folder}/rendezvous"
    start("nothing")
    start("the same", rank=me.rank, world_size=2)
    start("another rank", **only(0, rank=1))
    start("another size", **only(0, world_size=3))
    start("environment", {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    start("one has a method", **only(1, init_method=method))
    start("method", init_method=method)
    start("token", only(0, RANKMESH_TOKEN="of rank 0"))
    start("no host", {"RANKMESH_BIND": "192.0.2.1", "RANKMESH_TOKEN": "the secret of all"})
    start("attached", {"RANKMESH_HOSTING": "attached"})


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Reports]:
    """What both ranks were told, by the way in which they started."""
    return once(tmp_path_factory, lambda ranks: run(ranks, every_way, 2, port=free_port()))


@pytest.mark.parametrize("way", ["nothing", "the same", "environment", "method"])
def test_ranks_find_each_other(started: Callable[[], Reports], way: str) -> None:
    """Nothing has to be reported; and what is known may be reported again."""
    assert [reported[way]["sum"] for reported in started()] == [[2.0, 2.0]] * 2


def test_a_token_of_rank_0_is_everyones(started: Callable[[], Reports]) -> None:
    assert [reported["token"]["token"] for reported in started()] == ["of rank 0"] * 2


@pytest.mark.parametrize(
    ("way", "error", "text"),
    [
        ("another rank", "ValueError", "rank=1, but under backend 'mpi' it is MPI's, 0: leave it out"),
        ("another size", "ValueError", "world_size=3, but under backend 'mpi' it is MPI's, 2: leave it out"),
        ("one has a method", "ValueError", "only ranks [1] define the rendezvous"),
        ("no host", "DistNetworkError", "192.0.2.1"),
        ("attached", "ValueError", "needs the rank's agent in this process"),
    ],
)
def test_all_are_told_what_is_wrong(started: Callable[[], Reports], way: str, error: str, text: str) -> None:
    for reported in started():
        assert reported[way]["error"] == error
        assert text in reported[way]["text"]


@on_mpi(2)
def test_threads_may_call_mpi(me: Me) -> None:
    import mpi4py

    mpi4py.rc.thread_level = "funneled"
    told = me.attempt(dist.init_process_group, "mpi")
    assert told["error"] == "DistBackendError", told
    assert "mpi4py.rc.thread_level" in told["text"]


@on_mpi(2)
def test_a_program_may_have_initialized_mpi_itself(me: Me) -> None:
    from mpi4py import MPI

    before = MPI.COMM_WORLD.allreduce(me.rank)
    dist.init_process_group("mpi")
    array = np.ones(1)
    dist.all_reduce(array)
    dist.destroy_process_group()
    assert [before, float(array[0]), MPI.COMM_WORLD.allreduce(me.rank)] == [1, 2.0, 1]


# Without mpirun


@pytest.mark.processes
def test_several_ranks_need_mpirun(ranks: Ranks) -> None:
    (started,) = ranks.run(without_mpirun, 1, env={"WORLD_SIZE": "2", "RANK": "0", **files_in(ranks.folder)})
    assert started.reported["error"] == "ValueError"
    assert "mpirun -n 2 python script.py" in started.reported["text"]


def without_mpirun(me: Me) -> None:
    me.report(**me.attempt(dist.init_process_group, "mpi"))


@pytest.mark.processes
def test_a_group_needs_members_of_one_job(ranks: Ranks) -> None:
    for started in ranks.run(group_over_mpi, 2, env=files_in(ranks.folder)):
        assert started.reported["error"] == "DistBackendError"
        assert "mpirun -n 2 python script.py" in started.reported["text"]


def test_a_group_of_a_mesh_may_run_on_mpi(ranks: Ranks) -> None:
    assert [reported["group"] for reported in MpiRun(ranks, group_over_mpi, 2).succeed()] == [["mpi", 2.0, "mesh"]] * 2


def group_over_mpi(me: Me) -> None:
    me.init(timeout=30)
    made = []
    me.report(**me.attempt(lambda: made.append(dist.new_group(backend="mpi"))))
    for group in made:
        array = np.ones(1)
        dist.all_reduce(array, group=group)
        me.report(group=[dist.get_backend(group), float(array[0]), dist.get_backend()])


# Whether it is there


def asked(code: str, **env: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_"))}
    reported = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, env=environment | env
    )
    return reported.stdout + reported.stderr


ASK = "import sys, rankmesh; print(rankmesh.is_mpi_available(), 'mpi4py.MPI' in sys.modules)"


def test_asking_whether_it_is_there_does_not_initialize_it() -> None:
    assert asked(ASK).split() == ["True", "False"]


def test_it_is_not_there_without_a_library() -> None:
    assert asked(ASK, MPI4PY_LIBMPI="/nowhere/libmpi.so").split() == ["False", "False"]


def test_the_error_says_what_is_missing() -> None:
    code = "import rankmesh\ntry: rankmesh.init_process_group('mpi')\nexcept rankmesh.DistBackendError as e: print(e)"
    reported = asked(code, MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert "mpi4py finds no MPI library" in reported
    assert "pip install 'rankmesh[mpi]'" in reported
