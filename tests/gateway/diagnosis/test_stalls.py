"""The rules of ``rankmesh diagnose``, on plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rankmesh_gateway.diagnosis.frames import location_of
from rankmesh_gateway.diagnosis.reports import RankReport
from rankmesh_gateway.diagnosis.stalls import find_stalls
from rankmesh_gateway.schemas import Finding

WORLD = "776f726c64000000"


def frame(
    line: int, origin: str = "user", function: str = "<module>", file: str = "/home/me/train.py"
) -> dict[str, Any]:
    return {"file": file, "line": line, "function": function, "code": "", "origin": origin}


def thread(*frames: dict[str, Any], name: str = "MainThread") -> dict[str, Any]:
    return {"name": name, "ident": 1, "native_id": 1, "daemon": False, "frames": list(frames)}


IN_CALL = thread(frame(14), frame(76, "rankmesh", "all_reduce", "reduce.py"))


def call(seq: int, op: str = "all_reduce", age: float = 40.0, group: str = WORLD, **more: Any) -> dict[str, Any]:
    text = f"{op}(float32[8], SUM)"
    return {
        "group": group,
        "seq": seq,
        "op": op,
        "call": text,
        "age": age,
        "peer": None,
        "tag": 0,
        "awaited": True,
        **more,
    }


def message(op: str, peer: int, tag: int = 0, age: float = 20.0, **more: Any) -> dict[str, Any]:
    return call(0, op, age, peer=peer, tag=tag, **more)


class World:
    """Reports on the ranks of a job."""

    def __init__(self, size: int) -> None:
        self.reports = [self._report(rank) for rank in range(size)]
        for report in self.reports:
            self.at(report.rank, seq=100)

    def _report(self, rank: int, **more: Any) -> RankReport:
        return RankReport(
            job="job",
            epoch=1,
            rank=rank,
            host="h",
            pid=700 + rank,
            url=f"http://h:{rank}",
            **{"state": "alive", **more},
        )

    def at(
        self,
        rank: int,
        *calls: dict[str, Any],
        seq: int,
        stack: dict[str, Any] | None = None,
        groups: Sequence[dict[str, Any]] = (),
        **more: Any,
    ) -> None:
        """SourceLocation a rank: its calls in flight, and the number of the latest it has begun."""
        world = {"id": WORLD, "name": "world", "ranks": list(range(len(self.reports))), "seq": seq}
        done = min((each["seq"] for each in calls if each["seq"]), default=seq + 1) - 1
        self.reports[rank].snapshot = {
            "attached": False,
            "groups": [world, *groups],
            "calls": list(calls),
            "ended": [call(done, age=41.0)],
            "store_waits": [],
            "stacks": [stack or (IN_CALL if calls else thread(frame(7), frame(8, function="load_batch")))],
            **more,
        }

    def wait(self, *ranks: int, seq: int = 101, **more: Any) -> None:
        """Have ranks wait in a collective of the world."""
        for rank in ranks:
            self.at(rank, call(seq, **more), seq=seq)

    def silent(self, rank: int, process: str = "", error: str = "no answer within 1 s") -> None:
        self.reports[rank].snapshot = None
        self.reports[rank].outside.state, self.reports[rank].error = process, error

    def only(self) -> Finding:
        (found,) = find_stalls(self.reports)
        return found


@pytest.fixture
def world() -> World:
    return World(4)


def test_a_rank_that_has_not_come(world: World):
    world.wait(0, 1, 3)
    found = world.only()
    assert found.text == (
        "rank 2 has not come to all_reduce #101 for 40.0 s; it is at train.py:8 in load_batch; "
        "ranks 0-1, 3 wait at train.py:14"
    )
    assert found.last == "all_reduce(float32[8], SUM) #100, 41.0 s ago"
    assert (found.kind, found.ranks, found.waiting, found.seconds) == ("elsewhere", [2], [0, 1, 3], 40.0)
    assert found.places == {rank: f"/home/me/train.py:{8 if rank == 2 else 14}" for rank in range(4)}
    assert not found.young


@pytest.mark.parametrize(("age", "count"), [(0.9, 0), (1.1, 1)])
def test_a_young_wait_is_no_finding(world: World, age: float, count: int):
    world.wait(0, 1, 3, age=age)
    found = find_stalls(world.reports)
    assert len(found) == count
    assert all(each.young for each in found)


def test_nothing_waits(world: World):
    assert find_stalls(world.reports) == []
    world.wait(0, 1, 2, 3, age=9.0)
    assert find_stalls(world.reports) == []
    assert find_stalls([]) == []


def test_all_ranks_are_in_a_call_that_goes_on(world: World):
    world.wait(0, 1, 2, 3, age=12.0)
    found = world.only()
    assert (found.kind, found.ranks) == ("slow", [0, 1, 2, 3])
    assert found.text.startswith("all ranks have come to all_reduce #101, and it goes on for 12.0 s; ranks 0-3 are at")


def test_several_ranks_that_have_not_come_are_one_finding(world: World):
    world.wait(0)
    world.at(3, seq=100, stack=thread(frame(30, function="save")))
    text = world.only().text
    assert text == (
        "ranks 1-3 have not come to all_reduce #101 for 40.0 s; ranks 1-2 are at train.py:8 in load_batch, "
        "rank 3 is at train.py:30 in save; rank 0 waits at train.py:14"
    )


def test_ranks_that_wait_for_ranks_that_wait(world: World):
    """The cause is at the end of the chain."""
    pair = {"id": "aa", "name": "pair", "ranks": [1, 2], "seq": 5}
    world.wait(0, 3)
    world.at(1, call(5, "barrier", 39.0, "aa"), seq=100, groups=[pair])
    world.at(2, seq=100, groups=[{**pair, "seq": 4}])
    found = world.only()
    assert (found.ranks, found.waiting) == ([2], [0, 1, 3])
    assert found.text.startswith("rank 2 has not come to all_reduce #101 for 40.0 s; it is at")
    world.at(2, call(101), seq=101, groups=[{**pair, "seq": 4}])
    found = world.only()
    assert (found.kind, found.ranks, found.waiting) == ("order", [1, 2], [0, 3])
    assert "rank 1 is in barrier #5 of group pair at train.py:14, rank 2 is in all_reduce #101 at" in found.text
    assert found.text.endswith("; behind them ranks 0, 3 wait at train.py:14")


def test_an_asynchronous_call_does_not_hold_up_its_rank(world: World):
    """Rank 2 has a call in flight, and is in its own code."""
    pair = {"id": "aa", "name": "pair", "ranks": [2, 3], "seq": 1}
    world.wait(0, 1)
    world.at(2, call(1, group="aa", age=50.0), seq=100, stack=thread(frame(9)), groups=[pair])
    world.at(3, seq=100, groups=[{**pair, "seq": 0}], stack=thread(frame(20)))
    found = find_stalls(world.reports)
    assert {rank for each in found for rank in each.ranks} == {2, 3}
    assert {each.kind for each in found} == {"elsewhere"}


@pytest.mark.parametrize(
    ("process", "kind", "words"),
    [
        ("T", "stopped", "process 702 on h is stopped (SIGSTOP, or Ctrl-Z)"),
        ("R", "silent", "process 702 on h computes, and the agent's thread in it does not run"),
        ("-", "ended", "process 702 on h has ended"),
        ("", "silent", "no answer within 1 s from http://h:2 (process 702 on h)"),
    ],
)
def test_a_rank_that_does_not_answer(world: World, process: str, kind: str, words: str):
    world.wait(0, 1, 3)
    world.silent(2, process)
    found = world.only()
    assert (found.kind, found.ranks, found.waiting) == (kind, [2], [0, 1, 3])
    assert found.text == (
        f"rank 2 does not answer: {words}; its last operation was all_reduce(float32[8], SUM) #100; "
        "ranks 0-1, 3 wait at train.py:14 in all_reduce #101 for 40.0 s"
    )
    assert found.remedy


def test_the_gateway_knows_more_of_a_rank_that_does_not_answer(world: World):
    """It has begun the call: whether it is late is not known, but another rank certainly is."""
    world.wait(0, 1)
    world.silent(2, "T")
    group = {"job": "job", "epoch": 1, "id": WORLD, "name": "world", "seqs": {"2": 101}}
    stopped, elsewhere = find_stalls(world.reports, [group])
    assert (stopped.kind, stopped.ranks, stopped.waiting) == ("stopped", [2], [])
    assert stopped.text.endswith("; its last operation was all_reduce(float32[8], SUM) #101")
    assert (elsewhere.kind, elsewhere.ranks) == ("elsewhere", [3])


def test_a_rank_that_does_not_answer_and_that_none_waits_for(world: World):
    world.silent(2, "R")
    assert (world.only().kind, world.only().ranks) == ("silent", [2])


def test_failed_and_joining_ranks(world: World):
    world.silent(2)
    world.reports[2].state, world.reports[2].reason = "failed", "signal SIGKILL (9)"
    assert world.only().text == "rank 2 (h, pid 702) has failed: signal SIGKILL (9)"
    for report in world.reports:
        report.state, report.snapshot = "joining", None
    assert world.only().text == "job job waits for more ranks to join; ranks 0-3 are there"


def test_a_wait_for_a_key(world: World):
    world.wait(0, 1)
    store = {"op": "wait", "keys": ["a", "b"], "age": 50.0, "seconds": 300.0}
    for rank in (2, 3):
        world.at(rank, seq=100, stack=IN_CALL, store_waits=[store])
    found = world.only()
    assert (found.kind, found.ranks, found.seconds) == ("key", [2, 3], 50.0)
    assert found.text == (
        "ranks 2-3 wait in store.wait for keys 'a', 'b', which are not all set, for 50.0 s; ranks 2-3 are at "
        "train.py:14; ranks 0-1 wait at train.py:14 in all_reduce #101"
    )


def test_a_thread_that_watches_a_key_is_no_finding(world: World):
    store = {"op": "get", "keys": ["end"], "age": 50.0, "seconds": 300.0}
    watcher = thread(frame(90, function="watch"), frame(5, "rankmesh"), name="watcher")
    computing = thread(frame(8))
    world.at(2, seq=100, store_waits=[store], stacks=[computing, watcher])
    assert find_stalls(world.reports) == []


@pytest.mark.parametrize(
    ("ops", "kind"),
    [
        ([("send", 0), ("send", 0)], "messages"),
        ([("recv", 0), ("recv", 0)], "messages"),
        ([("send", 4), ("recv", 5)], "tags"),
    ],
)
def test_two_ranks_that_wait_for_each_other_in_messages(world: World, ops: list[tuple[str, int]], kind: str):
    for rank, (op, tag) in enumerate(ops):
        world.at(rank, message(op, 1 - rank, tag, age=20.0 + rank), seq=100)
    found = world.only()
    assert (found.kind, found.ranks, found.seconds) == (kind, [0, 1], 20.0)


def test_a_message_under_way_is_no_circle(world: World):
    world.at(0, message("send", 1, age=9.0), seq=100)
    world.at(1, message("recv", 0, age=9.0), seq=100)
    assert find_stalls(world.reports) == []
    world.at(1, message("recv", 0), seq=100)
    world.at(0, message("send", 1), seq=100)
    assert (world.only().kind, world.only().ranks) == ("slow", [0, 1])


def test_a_receive_that_no_thread_waits_for_is_none(world: World):
    world.at(0, message("recv", 1, awaited=False), seq=100, stack=thread(frame(8)))
    assert find_stalls(world.reports) == []


def test_a_receive_from_any_rank(world: World):
    world.at(0, message("recv", -1), seq=100)
    found = world.only()
    assert (found.ranks, found.waiting) == ([1, 2, 3], [0])
    assert "recv from any rank (tag 0)" in found.text


def test_queued_calls_have_not_begun(world: World):
    """Rank 2 has begun nothing after #100, but others have queued two more calls behind #101."""
    for rank in (0, 1, 3):
        world.at(rank, call(101), call(102), call(103), seq=101)
    assert world.only().call == "all_reduce #101"


def test_a_group_that_is_being_created(world: World):
    group = {"id": "bb", "name": "half", "ranks": [0, 2], "seq": 0}
    world.at(0, call(0, "new_group", group="bb"), seq=100, groups=[group])
    found = world.only()
    assert (found.ranks, found.call) == ([2], "new_group of group half")


def test_attached_ranks_have_no_place(world: World):
    world.wait(0, 1, 3)
    for report in world.reports:
        assert report.snapshot is not None
        report.snapshot["attached"] = True
    assert world.only().text == "rank 2 has not come to all_reduce #101 for 40.0 s; ranks 0-1, 3 wait"


def test_jobs_are_apart(world: World):
    world.wait(0, 1, 3)
    other = World(2)
    for report in other.reports:
        report.job = "other"
    found = find_stalls([*world.reports, *other.reports])
    assert [each.job for each in found] == ["job"]


def test_a_chain_of_a_thousand_ranks():
    world = World(1000)
    for rank in range(999):
        world.at(rank, message("recv", rank + 1), seq=100)
    found = world.only()
    assert (found.ranks, len(found.waiting)) == ([999], 999)


def test_location_of_threads():
    library = thread(frame(8, function="load"), frame(171, "library", "Queue.get"), frame(320, "library", "wait"))
    assert str(location_of([library], waits=False)) == "train.py:8 in load (inside Queue.get)"
    helper = thread(frame(50), frame(1, "rankmesh"), name="helper")
    assert str(location_of([library, helper], waits=True)) == "train.py:50"
    assert str(location_of([library, helper], waits=False)).startswith("train.py:8")
    own = thread(frame(1, "library"), frame(2, "rankmesh"), name="rankmesh-heartbeat")
    assert location_of([own], waits=False) is None


def test_a_call_that_has_failed_tells_nothing_of_other_ranks(world: World):
    world.wait(0, 1, 3)
    for report in world.reports:
        assert report.snapshot is not None
        report.snapshot["ended"].append(call(101, age=39.0, error="CollectiveTimeoutError: too late"))
    world.silent(2)
    assert "; its last operation was all_reduce(float32[8], SUM) #100; " in world.only().text


def test_collectives_that_differ_under_one_number(world: World):
    world.wait(0, 1, 3)
    world.at(2, call(101, "barrier"), seq=101)
    found = world.only()
    assert (found.kind, found.ranks, found.waiting, found.seconds) == ("order", [2], [0, 1, 3], 40.0)
    assert found.text == (
        "collective #101 differs between the ranks for 40.0 s: ranks 0-1, 3 are in all_reduce(float32[8], SUM) at "
        "train.py:14, rank 2 is in barrier(float32[8], SUM) at train.py:14"
    )


@pytest.mark.parametrize(
    ("failed_ranks", "texts"),
    [
        ({2: [], 0: [2], 3: [2]}, ["rank 2 (h, pid 702) has failed: broken; ranks 0, 3 failed because of it"]),
        ({2: [1], 0: [2], 3: [0]}, ["rank 2 (h, pid 702) has failed: broken; ranks 0, 3 failed because of it"]),
        (
            {2: [], 0: [], 3: [1, 0]},
            [
                "rank 2 (h, pid 702) has failed: broken",
                "rank 0 (h, pid 700) has failed: broken; rank 3 failed because of it",
            ],
        ),
    ],
    ids=["a cause", "the earliest, where each blames another", "two causes"],
)
def test_ranks_that_failed_because_of_another(world: World, failed_ranks: dict[int, list[int]], texts: list[str]):
    """In the order in which they failed."""
    for age, (rank, blamed) in enumerate(failed_ranks.items()):
        report = world.reports[rank]
        report.state, report.reason, report.failed_ranks, report.heartbeat_age = "failed", "broken", blamed, 9.0 - age
        report.snapshot = None
    assert [each.text for each in find_stalls(world.reports)] == texts


def test_a_job_that_is_over(world: World):
    """Every wait counts, and ranks without a dump are one finding."""
    world.wait(0, age=0.001)
    for rank in (2, 3):
        world.silent(rank, error="")
        world.reports[rank].state = "no-dump"
    missing, elsewhere = find_stalls(world.reports, over=True)
    assert missing.text == "ranks 2-3 left no dump; rank 0 waits at train.py:14 in all_reduce #101 for 1 ms"
    assert (elsewhere.kind, elsewhere.ranks, elsewhere.young) == ("elsewhere", [1], False)
