"""The verdict on observed ranks, whose calls are in their stacks alone, on plain data."""

from __future__ import annotations

from typing import Any

import pytest

from rankmesh_agent.wire.snapshot import ProcessView
from rankmesh_gateway.diagnosis.library_calls import library_call
from rankmesh_gateway.diagnosis.reports import RankReport
from rankmesh_gateway.diagnosis.stalls import find_stalls
from rankmesh_gateway.schemas import Finding

TORCH = "/env/lib/python3.13/site-packages/torch/distributed/distributed_c10d.py"


def frame(line: int, code: str = "", function: str = "<module>", file: str = "/home/me/solve.py") -> dict[str, Any]:
    origin = "library" if "site-packages" in file else "user"
    return {"file": file, "line": line, "function": function, "code": code, "origin": origin}


def stack(*frames: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"name": "MainThread", "ident": 1, "native_id": 1, "daemon": False, "frames": list(frames)}]


def report(rank: int, *frames: dict[str, Any], unchanged: float = 40.0) -> RankReport:
    found = RankReport("job", 1, rank, "h", 700 + rank, f"http://h:{rank}", "alive", observed=True)
    parts = {name: [] for name in ("groups", "calls", "ended", "store_waits")}
    found.snapshot = {**parts, "attached": False, "stacks": stack(*frames), "unchanged": unchanged}
    return found


ALLREDUCE = frame(41, "comm.Allreduce(mine, total)")
RECV = frame(30, "comm.Recv(halo, source=1)")
COMPUTES = (frame(50, "step()"), frame(37, "a @ b", "exchange"))


TORCHS = [frame(3), frame(9, "", "log.<locals>.wrapper", TORCH), frame(8, "", "all_reduce", TORCH)]


def only(*reports: RankReport) -> Finding:
    (found,) = find_stalls(reports)
    return found


@pytest.mark.parametrize(
    ("frames", "name", "kind"),
    [
        ([ALLREDUCE], "Allreduce", "collective"),
        ([frame(3, "data = comm.recv(source=0)")], "recv", "message"),
        ([frame(3, "comm.Ssend(data, 1)")], "Ssend", "message"),
        ([frame(3, "from mpi4py import MPI")], "MPI_Init", "collective"),
        ([frame(3, "request.Wait()")], "Wait", "collective"),
        (TORCHS, "all_reduce", "collective"),
        ([frame(3, "dist.recv(x)"), frame(8, "", "recv", TORCH)], "recv", "message"),
    ],
)
def test_a_call_of_a_library(frames: list[dict[str, Any]], name: str, kind: str):
    found = library_call(stack(*frames))
    assert found is not None
    assert (found.name, found.kind, found.place.line) == (name, kind, frames[0]["line"])


@pytest.mark.parametrize(
    "frames",
    [
        list(COMPUTES),
        [frame(3, "Allreduce = 3")],
        [frame(3, "comm.Allreduce(work(), out)"), frame(9, "while True: pass", "work")],
        [frame(3, "all_reduce(x)"), frame(9, "", "get", "/env/site-packages/queues/queue.py")],
        [frame(9, "", "all_reduce", TORCH)],
    ],
)
def test_no_call_of_a_library(frames: list[dict[str, Any]]):
    assert library_call(stack(*frames)) is None


def test_ranks_in_no_call_hold_up_those_in_one():
    found = only(*(report(rank, ALLREDUCE) for rank in (0, 1, 3)), report(2, *COMPUTES, unchanged=0.0))
    assert found.text == (
        "rank 2 has not come to Allreduce for 40.0 s; it is at solve.py:37 in exchange; "
        "ranks 0-1, 3 wait at solve.py:41"
    )
    assert (found.kind, found.ranks, found.waiting, found.young) == ("elsewhere", [2], [0, 1, 3], False)


def test_a_rank_that_computes_may_be_slow():
    computes = report(1, *COMPUTES)
    computes.outside = ProcessView("R", cpu=1.0)
    found = only(report(0, ALLREDUCE), computes)
    assert (found.kind, found.young) == ("elsewhere", True)
    assert not only(report(0, ALLREDUCE, unchanged=61.0), computes).young


def test_a_wait_is_as_old_as_the_youngest():
    moves = report(0, ALLREDUCE, unchanged=0.2)
    assert find_stalls([moves, report(1, ALLREDUCE), report(2, *COMPUTES)]) == []


def test_ranks_in_messages_hold_up_those_in_collectives():
    found = only(report(0, RECV), report(1, RECV), report(2, ALLREDUCE), report(3, ALLREDUCE))
    assert found.text == (
        "ranks 0-1 wait for each other for 40.0 s: ranks 0-1 are in Recv at solve.py:30; "
        "behind them ranks 2-3 wait at solve.py:41"
    )
    assert (found.kind, found.remedy) == ("messages", "let one of them send: nothing is on its way to either")


def test_ranks_in_several_calls():
    found = only(report(0, frame(12, "a.Allreduce(x, y)")), report(1, frame(15, "b.Allreduce(x, y)")))
    assert found.text == (
        "ranks 0-1 wait for each other for 40.0 s: rank 0 is in Allreduce at solve.py:12, rank 1 is in Allreduce at "
        "solve.py:15"
    )


def test_all_ranks_in_one_call():
    found = only(report(0, ALLREDUCE), report(1, ALLREDUCE))
    assert found.text == "all ranks have come to Allreduce, and it goes on for 40.0 s; ranks 0-1 are at solve.py:41"
    assert find_stalls([report(0, ALLREDUCE, unchanged=5.0), report(1, ALLREDUCE, unchanged=5.0)]) == []


def test_a_stopped_rank():
    stopped = report(1)
    stopped.snapshot, stopped.outside = None, ProcessView("T")
    found = only(report(0, ALLREDUCE), stopped)
    assert found.text == (
        "rank 1 cannot go on: process 701 on h is stopped (SIGSTOP, or Ctrl-Z); rank 0 waits at solve.py:41 in "
        "Allreduce for 40.0 s"
    )
    assert found.kind == "stopped"


def test_a_rank_without_a_stack():
    blind = report(1)
    blind.snapshot, blind.outside = None, ProcessView("R", no_stacks="pip install py-spy")
    found = only(report(0, ALLREDUCE), blind)
    assert found.text.startswith("rank 1 has no known stack: process 701 on h runs; rank 0 waits")
    assert found.remedy == "pip install py-spy"
