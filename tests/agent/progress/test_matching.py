"""Point-to-point messages over every transport, ranks as threads."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from support.processes import wait_until
from support.threads import LATER, NOW, TRANSPORTS, World, world

from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.group.options import Options
from rankmesh_agent.progress.matching import ANY, WINDOW, MessageMatcher
from rankmesh_agent.transports.tcp import SOCKET_BUFFER
from rankmesh_agent.wire import frames
from rankmesh_agent.wire.dtypes import FROM_CODE
from rankmesh_agent.wire.errors import CollectiveTimeoutError, DistBackendError
from rankmesh_agent.wire.frames import Opcode
from rankmesh_agent.wire.ops import ReduceOp

TIMEOUT = 20.0
EAGER = 1 << 12  # as support.threads sets it


@pytest.fixture(params=TRANSPORTS)
def pair(request: pytest.FixtureRequest) -> Iterator[World]:
    with world(2, request.param) as made:
        yield made


@pytest.fixture(params=TRANSPORTS)
def trio(request: pytest.FixtureRequest) -> Iterator[World]:
    with world(3, request.param) as made:
        yield made


def send(members: LocalCommunicator, array: Any, to: int, tag: int = 0, timeout: float = TIMEOUT) -> None:
    members.send(array, to, tag, Options(timeout))


def isend(members: LocalCommunicator, array: Any, to: int, tag: int = 0) -> Any:
    return members.send(array, to, tag, LATER._replace(result=[array]))


def recv(members: LocalCommunicator, array: Any, source: int, tag: int = 0, timeout: float = TIMEOUT) -> Any:
    return members.receive(array, source, tag, Options(timeout))


def irecv(members: LocalCommunicator, array: Any, source: int, tag: int = 0) -> Any:
    return members.receive(array, source, tag, LATER._replace(result=[array]))


@pytest.mark.parametrize("seed", range(4))
def test_messages_of_any_length_dtype_and_tag_both_ways(pair: World, seed: int) -> None:
    """Both ranks send all their messages first; within a tag, messages arrive in order."""
    dice, dtypes = random.Random(seed), list(FROM_CODE.values())
    counts, tags = [0, 1, EAGER // 8, EAGER // 8 + 1, 3_000, 100_000], [-3, 0, 7]
    messages = [
        [
            (dice.choice(tags), np.frombuffer(dice.randbytes(dice.choice(counts) * dtype.itemsize), dtype))
            for dtype in dice.sample(dtypes, len(dtypes))
        ]
        for _ in range(2)
    ]

    def call(members: LocalCommunicator) -> None:
        other = 1 - members.rank
        works = [isend(members, array, other, tag) for tag, array in messages[members.rank]]
        for tag in random.Random(seed).sample(tags, 3):
            for array in [array for sent_with, array in messages[other] if sent_with == tag]:
                got = np.zeros(array.size, array.dtype)
                assert recv(members, got, other, tag) == other
                assert got.tobytes() == array.tobytes()
        for work in works:
            assert work.wait() is True
            assert work.is_completed()

    pair.run(call)


def test_a_receive_from_anyone_tells_whom_it_was(trio: World) -> None:
    def call(members: LocalCommunicator) -> list[int]:
        if members.rank != 0:
            send(members, np.full(20_000, members.rank), 0, members.rank)
            return []
        sources = []
        for tag in (2, 1):
            got = np.zeros(20_000, np.int64)
            source = recv(members, got, ANY, tag)
            assert (got == source).all()
            sources.append(source)
        return sources

    assert trio.run(call)[0] == [2, 1]


def test_irecv_completes_in_the_background(pair: World) -> None:
    def call(members: LocalCommunicator) -> None:
        if members.rank == 0:
            got = np.zeros(100_000)
            work = irecv(members, got, 1)
            wait_until(work.is_completed, "the message", TIMEOUT)
            assert work.source_rank() == 1
            assert work.result()[0] is got
            assert (got == 4).all()
        else:
            send(members, np.full(100_000, 4.0), 0)

    pair.run(call)


def send_often(members: LocalCommunicator) -> None:
    """Send until something is told, a second at most."""
    for _ in range(100):
        send(members, np.zeros(1), 1, tag=9)
        members.engine.progress()
        time.sleep(0.01)


@pytest.mark.parametrize("count", [10, 100_000])
def test_another_size_or_dtype_is_refused_and_the_group_goes_on(pair: World, count: int) -> None:
    def call(members: LocalCommunicator) -> None:
        for wrong in (np.zeros(count + 1), np.zeros(count, np.float32)):
            if members.rank == 0:
                work = isend(members, np.zeros(count), 1)
                if count * 8 > EAGER:
                    with pytest.raises(DistBackendError, match=r"rank 1 refused"):
                        work.wait()
                else:
                    work.wait()
            else:
                with pytest.raises(DistBackendError, match=rf"rank 0 sent float64\[{count}\] with tag 0, but"):
                    recv(members, wrong, 0)
                assert not wrong.any()
            members.barrier(NOW)
            if members.rank == 0 and count * 8 <= EAGER:  # its send had returned: the next message tells
                with pytest.raises(DistBackendError, match=r"rank 1 refused the message: rank 0 sent"):
                    send_often(members)
        members.barrier(NOW)

    pair.run(call)


def test_a_slow_receiver_bounds_memory(pair: World) -> None:
    """More eager messages than the window holds: the rest is only announced, and all arrive in order."""
    messages = 5 * WINDOW // 4 // EAGER
    sent = threading.Event()

    def call(members: LocalCommunicator) -> int:
        if members.rank == 0:
            works = [isend(members, np.full(EAGER // 8, float(number)), 1) for number in range(messages)]
            sent.set()
            for work in works:
                work.wait()
            return 0
        assert sent.wait(TIMEOUT)
        kept = 0
        for number in range(messages):
            got = np.zeros(EAGER // 8)
            recv(members, got, 0)
            assert (got == number).all()
            payloads = [message.payload for message in members.matcher.unexpected if message.payload is not None]
            kept = max(kept, sum(map(len, payloads)))
        return kept

    assert 0 < pair.run(call)[1] <= WINDOW


def test_nothing_sent_in_time_names_the_sender_and_the_group_goes_on(pair: World) -> None:
    def call(members: LocalCommunicator) -> None:
        if members.rank == 0:
            got = np.zeros(3)
            with pytest.raises(CollectiveTimeoutError, match=r"recv from rank 1 \(tag 9\).*rank 1 \(here, pid") as late:
                recv(members, got, 1, 9, timeout=0.1)
            assert late.value.ranks == (1,)
        members.barrier(NOW)
        if members.rank == 1:
            send(members, np.ones(3), 0, 9)
        else:
            recv(members, got, 1, 9)
            assert (got == 1).all()

    pair.run(call)


def test_a_large_message_nobody_asks_for_times_out_and_is_withdrawn(pair: World) -> None:
    withdrawn = threading.Event()

    def call(members: LocalCommunicator) -> None:
        if members.rank == 0:
            with pytest.raises(CollectiveTimeoutError, match="send to rank 1"):
                send(members, np.zeros(100_000), 1, 1, timeout=0.1)
            withdrawn.set()
            send(members, np.ones(100_000), 1, 1)
        else:
            assert withdrawn.wait(TIMEOUT)
            got = np.zeros(100_000)
            recv(members, got, 0, 1)
            assert (got == 1).all()

    pair.run(call)


def test_a_small_message_that_waits_behind_others_is_taken_back(trio: World) -> None:
    """The group goes on, the other messages arrive, and the credit is there again."""
    many = 3 * SOCKET_BUFFER // EAGER
    sent = threading.Event()

    def call(members: LocalCommunicator) -> None:
        if members.rank == 0:
            matching, peer = members.matcher, members.engine._peers[1]
            works = []
            for number in range(many):
                works.append(isend(members, np.full(EAGER // 8, float(number)), 1))
                if peer.outgoing:
                    break
            before = matching.credits[1].available
            if peer.outgoing and before >= EAGER:  # its connection takes no more
                with pytest.raises(CollectiveTimeoutError, match="send to rank 1"):
                    send(members, np.full(EAGER // 8, -1.0), 1, timeout=0)
                assert matching.credits[1].available == before
            works.append(isend(members, np.array([len(works)]), 1, tag=1))
            sent.set()
            for work in works:
                work.wait()
        elif members.rank == 1:
            assert sent.wait(TIMEOUT)
            count = np.zeros(1, np.int64)
            recv(members, count, 0, 1)
            for number in range(int(count[0])):
                got = np.zeros(EAGER // 8)
                recv(members, got, 0)
                assert (got == number).all()
        members.barrier(NOW)

    trio.run(call)


def test_waiting_shorter_than_the_operation_does_not_end_it(pair: World) -> None:
    def call(members: LocalCommunicator) -> None:
        if members.rank == 0:
            got = np.zeros(3)
            work = irecv(members, got, 1)
            with pytest.raises(CollectiveTimeoutError):
                work.wait(timeout=0.05)
            assert not work.is_completed()
            members.barrier(NOW)
            work.wait()
            assert (got == 1).all()
        else:
            members.barrier(NOW)
            send(members, np.ones(3), 0)

    pair.run(call)


def test_messages_and_collectives_of_two_groups_at_once(trio: World) -> None:
    def call(members: LocalCommunicator) -> None:
        other = trio.group(members.rank, 77, "other", [0, 2]) if members.rank != 1 else None
        works = []
        for turn in range(20):
            array = np.full(30_000, float(members.rank))
            works.append((array, members.all_reduce(array, ReduceOp.SUM, LATER)))
            if other is not None:
                peer = 2 - members.rank
                mine, got = np.full(9_000, float(turn)), np.zeros(9_000)
                sending = isend(other, mine, peer, turn)
                recv(other, got, peer, turn)
                sending.wait()
                assert (got == turn).all()
        for array, work in works:
            assert work is not None
            work.wait()
            assert (array == 3).all()
        if other is not None:
            other.close()

    trio.run(call)


@pytest.mark.parametrize("count", [EAGER // 8 - 1, EAGER // 8])
def test_a_message_that_was_asked_for_goes_straight_into_its_array(pair: World, count: int) -> None:
    """Whether all of it came with its header, or the rest was received later; alternating with others, and refused."""

    def call(members: LocalCommunicator) -> None:
        for turn in range(20):
            if members.rank == 0:
                members.barrier(NOW)  # the receives are posted
                send(members, np.full(3, -1.0), 1, 1)
                send(members, np.full(count, float(turn)), 1)
                send(members, np.full(count, turn + 0.5), 1)
                send(members, np.full(count, 7, np.float32), 1, 2)
            else:
                first, second, other, wrong = np.zeros(count), np.zeros(count), np.zeros(3), np.zeros(count)
                works = [irecv(members, first, 0), irecv(members, second, ANY), irecv(members, other, 0, 1)]
                refused = irecv(members, wrong, 0, 2)
                members.barrier(NOW)
                for work in works:
                    work.wait()
                    assert work.source_rank() == 0
                assert (first == turn).all()
                assert (second == turn + 0.5).all()
                assert (other == -1).all()
                with pytest.raises(DistBackendError, match=rf"rank 0 sent float32\[{count}\]"):
                    refused.wait()
                assert not wrong.any()
            members.barrier(NOW)
            if members.rank == 0:  # it is told of the refusal by one of its next messages
                with pytest.raises(DistBackendError, match="refused"):
                    send_often(members)
            members.barrier(NOW)
            if members.rank == 1:
                drain(members)

    pair.run(call)


def drain(members: LocalCommunicator) -> None:
    """Take what send_often sent."""
    with contextlib.suppress(CollectiveTimeoutError):
        while True:
            recv(members, np.zeros(1), 0, 9, timeout=0)


# One rank's side alone: the frames that it sends


class Wire:
    """An engine that keeps the headers of what is sent."""

    eager_limit, epoch = EAGER, 1

    def __init__(self) -> None:
        self.sent: list[frames.Header] = []

    def send(self, rank: int, buffers: Sequence[Any], transfer: Any = None) -> None:
        self.sent.append(frames.decode(buffers[0], 0, EAGER))

    def expose(self, rank: int, view: memoryview) -> tuple[int, int]:
        return 0, 0

    def cancel_remote_read(self, rank: int, group: int, number: int) -> None:
        pass


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def matcher(wire: Wire) -> MessageMatcher:
    return MessageMatcher(wire, 1, lambda rank: rank)  # type: ignore[arg-type]


def header(opcode: Opcode, **fields: int) -> frames.Header:
    return frames.Header(opcode, **{"dtype": 2, "group": 1, "epoch": 1, **fields})


def empty_messages_before_one_is_announced(matcher: MessageMatcher, wire: Wire) -> int:
    for count in range(2 * WINDOW >> 10):
        matcher.send(1, memoryview(b""), 2, 0)
        if wire.sent[-1].opcode is not Opcode.EAGER:
            return count
    raise AssertionError("none is announced")


def test_what_a_receiver_holds_is_bounded_also_if_messages_are_empty(matcher: MessageMatcher, wire: Wire) -> None:
    assert empty_messages_before_one_is_announced(matcher, wire) == WINDOW >> 10


def test_credit_is_given_back_when_a_quarter_is_due(matcher: MessageMatcher, wire: Wire) -> None:
    for _ in range(WINDOW >> 12):
        assert not wire.sent
        matcher.receive(1, memoryview(bytearray()), 2, 0)
        matcher.on_frame(1, header(Opcode.EAGER), b"")
    assert [(sent.opcode, sent.total) for sent in wire.sent] == [(Opcode.CREDIT, WINDOW // 4)]


def test_credit_beyond_the_window_is_not_taken(matcher: MessageMatcher, wire: Wire) -> None:
    matcher.on_frame(1, header(Opcode.CREDIT, total=10 * WINDOW), b"")
    assert empty_messages_before_one_is_announced(matcher, wire) == WINDOW >> 10


def test_a_receive_whose_message_is_withdrawn_keeps_its_place(matcher: MessageMatcher) -> None:
    first, second = (matcher.receive(1, memoryview(bytearray(1)), 2, 0) for _ in range(2))
    matcher.on_frame(1, header(Opcode.RTS, seq=7, total=1), b"")
    matcher.on_frame(1, header(Opcode.WITHDRAW, seq=7), b"")
    matcher.on_frame(1, header(Opcode.EAGER, length=1), b"x")
    assert (first.done, second.done) == (True, False)


def test_a_message_of_another_dtype_and_as_many_bytes_is_refused(matcher: MessageMatcher, wire: Wire) -> None:
    received = matcher.receive(1, memoryview(bytearray(1)), 2, 0)
    matcher.on_frame(1, header(Opcode.EAGER, dtype=1, length=1), b"x")
    assert "sizes and dtypes must be equal" in str(received.error)
    assert [sent.opcode for sent in wire.sent] == [Opcode.REFUSE]
