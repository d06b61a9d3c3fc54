"""What is kept of calls and messages: in flight, tallies, and the flight recorder; real groups, ranks as threads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from support.processes import wait_until
from support.threads import LATER, NOW, World, world

from rankmesh_agent.group import call_queue
from rankmesh_agent.group.flight_recorder import ENDED_GROUPS, MAX_GROUPS, OTHER_GROUPS, FlightRecorder
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.group.local_state import LocalGroupState
from rankmesh_agent.group.options import Options
from rankmesh_agent.progress.engine import ProgressEngine
from rankmesh_agent.wire.errors import CollectiveTimeoutError
from rankmesh_agent.wire.ops import ReduceOp
from rankmesh_agent.wire.schemas import MAX_IN_FLIGHT, FlightRecord
from rankmesh_agent.wire.stats import BOUNDS

SECONDS = 20.0


@pytest.fixture(params=["inproc", "segment"])
def pair(request: pytest.FixtureRequest) -> Iterator[World]:
    with world(2, request.param) as made:
        yield made


def reduce(members: LocalCommunicator, count: int = 4, options: Options = NOW) -> None:
    members.all_reduce(np.ones(count, np.float32), ReduceOp.SUM, options)


@contextlib.contextmanager
def while_it_runs(call: Callable[[], object], begun: Callable[[], bool]) -> Iterator[None]:
    """Have a thread make a call that waits; the block runs once it has begun."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    wait_until(begun, "the call to begin", SECONDS)
    yield
    thread.join(SECONDS)
    assert not thread.is_alive()


def tallies(members: LocalCommunicator) -> dict[str, tuple[int, int, int]]:
    """Calls, bytes and failures by kind; without the making of the group."""
    found = {op: (sum(tally.buckets), tally.nbytes, tally.failures) for op, tally in members.op_stats().items()}
    found.pop("new_group", None)
    return found


def remembered(members: LocalCommunicator) -> list[FlightRecord]:
    return [record for record in members.recorder.records() if record.op != "new_group"]


def test_a_call_that_waits_is_in_flight_until_the_others_come(pair: World) -> None:
    first, second = pair.communicators
    pair.run(reduce)
    assert first.info().inflight == []
    with while_it_runs(lambda: reduce(first, 256), lambda: bool(first.info().inflight)):
        (found,) = first.info().inflight
        assert (found.op, found.seq, found.bytes) == ("all_reduce(float32[256], SUM)", 2, 1024)
        assert 0 <= found.age < SECONDS
        wait_until(lambda: first.info().inflight[0].age > found.age, "its age to grow", SECONDS)
        assert (first.info().seq, second.info().seq) == (2, 1), "who has arrived, and who has not"
        assert second.info().inflight == []
        reduce(second, 256)
    assert first.info().inflight == []
    assert [each.info().bytes for each in pair.communicators] == [16 + 1024] * 2


def test_a_group_lists_only_so_many_calls(pair: World) -> None:
    first, second = pair.communicators
    works = [first.barrier(LATER) for _ in range(MAX_IN_FLIGHT + 10)]
    found = first.info().inflight
    assert len(found) == MAX_IN_FLIGHT
    assert [each.seq for each in found] == sorted(each.seq for each in found)
    assert len(first.active_records()) >= MAX_IN_FLIGHT
    for _ in works:
        second.barrier(NOW)
    assert works[-1] is not None
    works[-1].wait()


@pytest.mark.parametrize(("source", "described"), [(1, "recv from rank 1 (tag 7)"), (-1, "recv from any rank (tag 7)")])
def test_a_message_is_in_flight_until_it_is_done_and_counted_once(pair: World, source: int, described: str) -> None:
    first, second = pair.communicators
    work = first.receive(np.zeros(8), source, 7, LATER)
    (found,) = first.info().inflight
    assert (found.op, found.seq, found.bytes) == (described, 0, 64)
    second.send(np.ones(8), 0, 7, NOW)
    assert not isinstance(work, int)
    work.wait()
    work.wait()
    assert work.is_completed()
    assert first.info().inflight == []
    assert (tallies(first), tallies(second)) == ({"recv": (1, 64, 0)}, {"send": (1, 64, 0)})


def test_messages_without_a_wait_end_all_the_same(pair: World) -> None:
    first, second = pair.communicators
    arrays = [np.zeros(2) for _ in range(300)]
    works = [first.receive(array, 1, 0, LATER) for array in arrays]
    assert len(first.active_records()) == 300
    for _ in arrays:
        second.send(np.ones(2), 0, 0, NOW)
    wait_until(lambda: not first.active_records(), "the messages to end", SECONDS)
    assert tallies(first) == {"recv": (300, 4800, 0)}
    assert len(works) == 300


def test_a_message_that_timed_out_has_failed(pair: World) -> None:
    first = pair.communicators[0]
    with pytest.raises(CollectiveTimeoutError):
        first.receive(np.zeros(2), 1, 0, Options(0.05))
    assert tallies(first) == {"recv": (1, 16, 1)}
    (record,) = remembered(first)
    assert (record.state, record.op, record.dtype, record.count) == ("failed", "recv", "float64", 2)
    assert record.error.startswith("CollectiveTimeoutError: recv from rank 1 (tag 0)")


def test_the_flight_recorder_remembers_the_latest_in_their_order(pair: World) -> None:
    before = time.time()
    pair.run(lambda members: [reduce(members, count) for count in range(1, 6)])
    first = pair.communicators[0]
    records = remembered(first)
    assert [record.seq for record in records] == [1, 2, 3, 4, 5]
    last = records[-1]
    assert (last.name, last.op, last.call) == ("world", "all_reduce", "all_reduce(float32[5], SUM)")
    assert (last.dtype, last.count, last.bytes, last.state, last.error) == ("float32", 5, 20, "completed", "")
    assert last.end is not None
    assert before - 1 <= last.begin <= last.end <= time.time() + 1
    everything = first.recorder
    assert [record.seq for record in everything.records(last=2)] == [4, 5]
    assert (everything.records(last=0), everything.records(last=9)) == ([], everything.records())
    assert everything.records("world") == everything.records(f"{first.id:016x}") == everything.records()
    assert everything.records("another") == []


def test_making_a_group_is_in_flight_while_members_are_missing() -> None:
    with world(2, "tcp") as made:
        recorder = made.recorders[0]

        def making() -> list[FlightRecord]:
            return [record for record in recorder.records("pair") if record.state == "in-flight"]

        with while_it_runs(lambda: made.group(0, 5, "pair", (0, 1)).close(), lambda: bool(making())):
            assert [(record.op, record.seq) for record in making()] == [("new_group", 0)]
            made.group(1, 5, "pair", (0, 1)).close()


@pytest.fixture
def alone() -> Iterator[Callable[..., LocalCommunicator]]:
    """Makes groups of one rank."""
    engine = ProgressEngine(0, 1, 1, eager_limit=1024)
    yield lambda recorder, number=9: LocalCommunicator(
        LocalGroupState(engine, number, f"group {number}", (0,), {}, recorder), SECONDS
    )
    engine.close()


@pytest.mark.parametrize("kept", [0, 3])
def test_only_the_latest_records_are_kept(alone: Callable[..., LocalCommunicator], kept: int) -> None:
    recorder = FlightRecorder(kept)
    members = alone(recorder)
    for _ in range(5):
        members.barrier(NOW)
    assert [record.seq for record in recorder.records()] == [1, 2, 3, 4, 5][5 - kept :]
    assert sum(members.op_stats()["barrier"].buckets) == 5, "statistics count all calls"


@pytest.mark.parametrize(("seconds", "bucket"), [(0.0, 0), (1e-5, 0), (1.1e-5, 1), (0.2, 9), (1000.0, len(BOUNDS))])
def test_a_duration_counts_in_the_bucket_whose_bound_it_does_not_exceed(
    alone: Callable[..., LocalCommunicator], seconds: float, bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = alone(FlightRecorder())
    monkeypatch.setattr(call_queue, "monotonic", iter([0.0, seconds]).__next__)
    members.all_reduce(np.ones(1), ReduceOp.SUM, NOW)
    stats = members.op_stats()["all_reduce"]
    assert stats.buckets.index(1) == bucket
    assert (stats.seconds, stats.nbytes, stats.failures) == (seconds, 8, 0)


def test_statistics_of_many_groups_and_of_ended_ones_are_summed(alone: Callable[..., LocalCommunicator]) -> None:
    recorder = FlightRecorder()
    groups = [alone(recorder, number) for number in range(MAX_GROUPS + 3)]
    for members in groups:
        members.barrier(NOW)
    first, *others, last = recorder.operations()
    assert (first.group, first.op, sum(first.buckets)) == ("group 0", "barrier", 1)
    assert len(others) == MAX_GROUPS - 1
    assert (last.group, sum(last.buckets)) == (OTHER_GROUPS, 3)
    for members in groups:
        members.close()
        members.close()
    (ended,) = recorder.operations()
    assert (ended.group, ended.op, sum(ended.buckets)) == (ENDED_GROUPS, "barrier", MAX_GROUPS + 3)
    assert recorder.records()[-1].name == f"group {MAX_GROUPS + 2}", "their records stay"


def test_what_is_in_flight_is_counted_with_the_age_of_the_oldest(pair: World) -> None:
    first, second = pair.communicators
    recorder = first.recorder
    works = [first.barrier(LATER) for _ in range(3)]
    wait_until(lambda: first.info().seq == 1, "the call to begin", SECONDS)
    record = remembered(first)[-3]
    assert (record.op, record.seq, record.state, record.end) == ("barrier", 1, "in-flight", None)
    (found,) = [each for each in recorder.operations() if each.op == "barrier"]
    assert (found.group, found.in_flight, sum(found.buckets)) == ("world", 3, 0)
    assert 0 < found.oldest < SECONDS
    assert len(recorder.in_flight("world") or ()) == len(recorder.in_flight(f"{first.id:016x}") or ()) == 3
    assert recorder.in_flight("another") is None
    for _ in works:
        second.barrier(NOW)
    assert works[-1] is not None
    works[-1].wait()
    (found,) = [each for each in recorder.operations() if each.op == "barrier"]
    assert (found.in_flight, found.oldest, sum(found.buckets)) == (0, 0.0, 3)
    assert found.seconds > 0
