"""Errors of calls of many ranks, each of which hears from a few others only. Ranks as threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from support.pauses import despite_pauses
from support.threads import NOW, World, world

from rankmesh_agent.collectives.link import FEW_RANKS
from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.group.options import Options
from rankmesh_agent.progress.status import DIFFERENT, CallTable, Status, decode, encode
from rankmesh_agent.wire.errors import CollectiveMismatchError, CollectiveTimeoutError, DistBackendError
from rankmesh_agent.wire.frames import SMALL
from rankmesh_agent.wire.ops import ReduceOp

Array = np.ndarray[Any, Any]
SIZES = (12, 13, 14, 20)
"""Ranks that call by way of one rank; along a tree, as they share cores; in rounds, where all announce themselves to
all; and to their neighbours only."""
ODD = (0, 7)
"""Ranks that do not make the others' call."""


@contextlib.contextmanager
def ranks_of(size: int) -> Iterator[World]:
    with world(size, "tcp") as made:
        for members in made.communicators:
            members.link.shares_cores = size == 13  # type: ignore[misc]
        yield made


@pytest.fixture(scope="module", params=SIZES)
def many(request: pytest.FixtureRequest) -> Iterator[World]:
    with ranks_of(request.param) as made:
        yield made


def all_reduce(members: LocalCommunicator, options: Options = NOW) -> None:
    members.all_reduce(np.ones(3), ReduceOp.SUM, options)


def broadcast(members: LocalCommunicator, options: Options = NOW) -> None:
    members.broadcast(np.ones(3), 5, options)


def gather(members: LocalCommunicator, options: Options = NOW) -> None:
    outputs = [np.empty(3) for _ in range(members.size)] if members.rank == 2 else []
    members.gather(outputs, np.ones(3), 2, options)


def long(members: LocalCommunicator, options: Options = NOW) -> None:
    members.all_reduce(np.ones(30_000), ReduceOp.SUM, options)


def check_it_goes_on(members: LocalCommunicator) -> None:
    for _ in range(2):
        array = np.full(3, float(members.rank))
        members.all_reduce(array, ReduceOp.SUM, NOW)
        assert (array == members.size * (members.size - 1) / 2).all()
        members.barrier(NOW)


CALLS = [LocalCommunicator.barrier, all_reduce, broadcast, gather, long]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_mismatch_names_the_ranks_and_their_calls(many: World, call: Callable[..., None]) -> None:
    def other(members: LocalCommunicator) -> None:
        members.all_gather([np.empty(2) for _ in range(members.size)], np.ones(2), NOW)

    def run(members: LocalCommunicator) -> CollectiveMismatchError:
        check_it_goes_on(members)
        with pytest.raises(CollectiveMismatchError) as caught:
            other(members) if members.rank in ODD else call(members, NOW)
        check_it_goes_on(members)
        return caught.value

    for rank, error in enumerate(many.run(run)):
        named = set(range(many.size)) - set(ODD) if rank in ODD else set(ODD)
        assert set(error.ranks) == named
        assert error.message.count("all_gather(float64[2])") >= 1
        if many.size > FEW_RANKS:
            assert "ranks 0, 7: all_gather(float64[2])" in error.message
        assert call.__name__.replace("long", "all_reduce") in error.message


def test_no_rank_is_more_than_a_call_ahead(many: World) -> None:
    """A root that sends again and again is held up by slow ranks: no rank keeps frames of more than the next call."""

    def run(members: LocalCommunicator) -> int:
        most = 0
        for number in range(40):
            if members.rank == 9 and number % 10 == 0:
                with pytest.raises(CollectiveTimeoutError):
                    members.receive(np.ones(1), 0, 0, Options(0.1))
            array = np.full(3, float(number if members.rank == 5 else -1))
            members.broadcast(array, 5, NOW)
            assert (array == number).all()
            ahead = {seq for seq, _ in members.link._arrived.copy()}
            most = max(most, max(ahead, default=0) - members.state.seq)
        return most

    assert max(many.run(run)) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "size"),
    [
        *((LocalCommunicator.barrier, size) for size in (12, 13, 14)),
        *((all_reduce, 13), (all_reduce, 14), (all_reduce, 20), (broadcast, 12), (broadcast, 20)),
    ],
    ids=lambda value: value if isinstance(value, int) else value.__name__,
)
@despite_pauses
def test_a_timeout_names_the_missing_ranks(size: int, call: Callable[..., None]) -> None:
    def run(members: LocalCommunicator) -> DistBackendError | None:
        check_it_goes_on(members)
        if members.rank in ODD:
            return None
        with pytest.raises(DistBackendError) as caught:
            call(members, Options(3.0))
        return caught.value

    with ranks_of(size) as made:
        for error in made.run(run):
            if error is not None:
                assert set(error.ranks) == set(ODD), error.message


@pytest.mark.parametrize("odd", [0, 11])
@pytest.mark.parametrize("size", SIZES)
def test_a_rank_that_leaves_without_the_call_is_named(size: int, odd: int) -> None:
    all_made_the_call = threading.Barrier(size)

    def run(members: LocalCommunicator) -> None:
        members.barrier(NOW)
        all_made_the_call.wait(60)
        if members.rank == odd:
            members.close()
            members.engine.close("bored", timeout=0.5)
            return
        with pytest.raises(DistBackendError, match=rf"rank {odd} .*left \(bored\)") as caught:
            members.barrier(NOW)
        assert caught.value.ranks == (odd,)

    with ranks_of(size) as made:
        made.run(run)


@pytest.mark.parametrize("odd", [0, 11])
@pytest.mark.parametrize("size", SIZES)
def test_a_rank_that_leaves_after_its_last_call_disturbs_nobody(size: int, odd: int) -> None:
    def run(members: LocalCommunicator) -> None:
        members.barrier(NOW)
        members.barrier(NOW)
        if members.rank == odd:
            members.close()
            members.engine.close(timeout=0.5)

    with ranks_of(size) as made:
        made.run(run)


def tables(size: int) -> tuple[list[CallTable], list[list[tuple[Sequence[int], bytes]]]]:
    """Return the tables of the ranks of a group, and the reports that each one has sent."""
    sent: list[list[tuple[Sequence[int], bytes]]] = [[] for _ in range(size)]
    made = [CallTable(7, rank, size, lambda *report, to=sent[rank]: to.append(report)) for rank in range(size)]
    return made, sent


def deliver(made: list[CallTable], sent: list[list[tuple[Sequence[int], bytes]]]) -> int:
    """Deliver all reports that have been sent; return the bytes of the longest one."""
    reports = [report for each in sent for report in each]
    for each in sent:
        each.clear()
    for receivers, payload in reports:
        for to in receivers:
            made[to].merge(payload)
    return max((len(payload) for _, payload in reports), default=0)


def test_reports_of_calls_reach_all_ranks_by_way_of_neighbours() -> None:
    size, late = 100, {3, 50, 51}
    made, sent = tables(size)
    for rank, each in enumerate(made):
        each.report(2 if rank in late else 3, 5, "a call")
    frames_sent = 0
    for _ in range(2 * (size - 1).bit_length()):
        frames_sent += sum(len(receivers) for each in sent for receivers, _ in each)
        deliver(made, sent)
        for each in made:
            each.share()
    assert all(each.missing(3) == sorted(late - {rank}) for rank, each in enumerate(made))
    assert made[0].of_others()[50].text == "a call"
    assert frames_sent <= size * 10 * (size - 1).bit_length()


def test_few_ranks_report_once_to_all() -> None:
    made, sent = tables(FEW_RANKS)
    made[3].report(4, 5)
    made[3].report(4, 5)
    assert [receivers for receivers, _ in sent[3]] == [[rank for rank in range(FEW_RANKS) if rank != 3]]
    deliver(made, sent)
    made[0].share()
    assert not sent[0]
    assert 3 not in made[0].missing(4)


def test_a_report_of_a_later_call_counts_for_those_before_it() -> None:
    made, sent = tables(3)
    made[2].report(5, 77)
    deliver(made, sent)
    assert made[0].missing(4) == made[0].missing(5) == [1]
    assert made[0].missing(5, arrived=[1]) == []
    assert made[0].missing(6) == [1, 2]
    made[0].merge(encode([(Status(7, 4, 77, ""), 1 << 2)]))  # by another way, late
    assert {status.seq for status, _ in decode(made[0].encode())} == {5}
    assert made[0].differs(5, 78)
    assert not made[0].differs(5, 77)
    assert not made[0].differs(4, 78)


def test_a_description_stays_when_its_rank_goes_on() -> None:
    """A rank that has no time looks at it only when the other one waits in the next call already."""
    made, sent = tables(2)
    for seq, fingerprint, text in ((4, 5, "a call"), (4, DIFFERENT, "the call, and more"), (4, DIFFERENT, "")):
        made[1].report(seq, fingerprint, text)
    made[1].report(5, 6, "the next call")
    deliver(made, sent)
    assert made[0].descriptions(4) == {1: "the call, and more"}
    assert made[0].descriptions(5) == {}
    assert made[0].of_others()[1].text == "the next call"
    assert made[0].differs(4, 5)
    assert made[0].missing(5) == []


def test_descriptions_stay_when_a_rank_goes_on_to_another_call_that_differs() -> None:
    """Until this rank goes on, too: it waits for all of them."""
    made, sent = tables(2)
    for seq in (4, 5, 6):
        made[1].report(seq, DIFFERENT, f"call {seq}")
    deliver(made, sent)
    for seq in (4, 5, 6):
        made[0].oldest = seq
        assert made[0].descriptions(seq) == {1: f"call {seq}"}
    made[1].report(7, DIFFERENT, "call 7")
    deliver(made, sent)
    assert {status.seq for status, _ in decode(made[0].encode())} == {6, 7}


@pytest.mark.parametrize("length", [10, 1500, 3000])
def test_a_report_fits_into_a_frame_and_loses_texts_first(length: int) -> None:
    """Of many different descriptions; and of ranks in earlier calls only while a call may still be under way."""
    size = 64
    made, sent = tables(size)
    for rank, each in enumerate(made):
        each.report(9, DIFFERENT, f"{rank:0{length}}")
    for _ in range(2 * size.bit_length()):
        assert deliver(made, sent) <= SMALL
        for each in made:
            each.share()
    assert all(len(each.descriptions(9)) == size for each in made)
    found = sum(bool(text) for text in made[0].descriptions(9).values())
    assert found == size if length < 1000 else 20 <= found < size
    made[0].oldest = 10
    assert made[0].encode() == b"[]"


@pytest.mark.parametrize("payload", [b"", b"[[", b"[[1, 2, 3]]", b'[[1, 2, 3, "", [], "x"]]', b'{"no": "list"}'])
def test_a_report_that_cannot_be_read_is_empty(payload: bytes) -> None:
    assert decode(payload) == []
