"""Point-to-point messages over every transport, ranks as threads."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from support.threads import LATER, NOW, TRANSPORTS, World, world

from rankmesh_agent.group.local import LocalCommunicator
from rankmesh_agent.group.options import Options
from rankmesh_agent.progress.matching import WINDOW, MessageMatcher
from rankmesh_agent.progress.message_queues import ANY
from rankmesh_agent.transports.tcp_connection import SOCKET_BUFFER
from rankmesh_agent.wire import frames
from rankmesh_agent.wire.dtypes import FROM_CODE
from rankmesh_agent.wire.errors import CollectiveTimeoutError, DistBackendError, GroupAbortedError, RankFailedError
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


# Both ends in one thread: a background thread progresses asynchronous messages


def test_short_messages_are_received_in_the_order_of_the_receives(pair: World) -> None:
    sender, receiver = pair.communicators
    first, second, third = np.zeros(1), np.zeros(1), np.zeros(1)
    posted = receiver.messages.begin("recv", first, 0, 5, Options(TIMEOUT))  # no thread takes its message
    for number, tag in ((1.0, 5), (3.0, 7), (2.0, 5)):
        send(sender, np.array([number]), 1, tag)
    assert recv(receiver, second, 0, 5) == 0
    posted.complete(posted.deadline)
    recv(receiver, third, ANY, 7)
    assert (first, second, third) == (1, 2, 3)


def test_ranks_that_never_wait_for_each_other_learn_that_another_one_has_failed(trio: World) -> None:
    one, other, _ = trio.communicators
    trio.meshes[2]._peers[0].connection.close()  # as the end of its process does

    def exchange() -> None:
        for number in range(1000):
            send(one, np.full(1, number), 1)
            recv(other, got := np.zeros(1, np.int64), 0)
            assert got == number
            send(other, got, 0)
            recv(one, got, 1)

    with pytest.raises(RankFailedError, match="rank 2"):
        exchange()


def test_another_size_or_dtype_of_a_long_message_is_refused_and_the_group_goes_on(pair: World) -> None:
    sender, receiver = pair.communicators
    count = 100_000
    for wrong in (np.zeros(count + 1), np.zeros(count, np.float32)):
        work = isend(sender, np.zeros(count), 1)
        with pytest.raises(DistBackendError, match=rf"rank 0 sent float64\[{count}\] with tag 0, but"):
            recv(receiver, wrong, 0)
        assert not wrong.any()
        with pytest.raises(DistBackendError, match=r"rank 1 refused the message: rank 0 sent"):
            work.wait()
        send(sender, np.ones(1), 1)
        recv(receiver, np.zeros(1), 0)


@pytest.mark.parametrize("wrong", [np.zeros(11), np.zeros(10, np.float32)], ids=["size", "dtype"])
def test_another_size_or_dtype_of_a_short_message_ends_the_group(trio: World, wrong: Any) -> None:
    """Its send has returned: the next call of each rank raises the error of the receiver."""
    refused = threading.Event()

    def call(members: LocalCommunicator) -> None:
        if members.rank == 0:
            send(members, np.zeros(10), 1)
        if members.rank == 1:
            own = r"^rank 0 sent float64\[10\] with tag 0, but the receive"
            with pytest.raises(DistBackendError, match=own) as raised:
                recv(members, wrong, 0)
            assert not isinstance(raised.value, GroupAbortedError)
            assert not wrong.any()
            refused.set()
        assert refused.wait(TIMEOUT)
        told = rf"^rank 1 refused the message: rank 0 sent float64\[10\] .* the receive expects {wrong.dtype}"
        with pytest.raises(GroupAbortedError, match=told) as caught:
            members.all_reduce(np.ones(1), ReduceOp.SUM, NOW)
        assert caught.value.ranks == ()

    trio.run(call)


def test_a_slow_receiver_bounds_memory(pair: World) -> None:
    """More eager messages than the window holds: the rest is only announced, and all arrive in order."""
    sender, receiver = pair.communicators
    works = [isend(sender, np.full(EAGER // 8, float(number)), 1) for number in range(5 * WINDOW // 4 // EAGER)]
    kept = 0
    for number in range(len(works)):
        got = np.zeros(EAGER // 8)
        recv(receiver, got, 0)
        assert (got == number).all()
        payloads = [message.payload for message in receiver.matcher.unexpected if message.payload is not None]
        kept = max(kept, sum(map(len, payloads)))
    assert 0 < kept <= WINDOW
    for work in works:
        work.wait()


def test_a_receive_that_times_out_names_the_sender_and_the_group_goes_on(pair: World) -> None:
    sender, receiver = pair.communicators[1], pair.communicators[0]
    got = np.zeros(3)
    with pytest.raises(CollectiveTimeoutError, match=r"recv from rank 1 \(tag 9\).*rank 1 \(here, pid") as late:
        recv(receiver, got, 1, 9, timeout=0.1)
    assert late.value.ranks == (1,)
    send(sender, np.ones(3), 0, 9)
    recv(receiver, got, 1, 9)
    assert (got == 1).all()


def test_a_large_message_without_a_receive_times_out_and_is_withdrawn(pair: World) -> None:
    sender, receiver = pair.communicators
    with pytest.raises(CollectiveTimeoutError, match="send to rank 1"):
        send(sender, np.zeros(100_000), 1, 1, timeout=0.1)
    work = isend(sender, np.ones(100_000), 1, 1)
    got = np.zeros(100_000)
    recv(receiver, got, 0, 1)
    assert (got == 1).all()
    work.wait()


def test_a_small_message_behind_others_is_cancelled(pair: World) -> None:
    """Its credit is available again, and the other messages arrive."""
    sender, receiver = pair.communicators
    matcher, peer = sender.matcher, sender.engine._peers[1]
    works = []
    with sender.engine.lock:  # the background thread sends nothing meanwhile
        while not peer.outgoing and len(works) < 3 * SOCKET_BUFFER // EAGER:
            works.append(isend(sender, np.full(EAGER // 8, float(len(works))), 1))
        before = matcher.credits[1].available
        if peer.outgoing and before >= EAGER:  # its connection takes no more
            with pytest.raises(CollectiveTimeoutError, match="send to rank 1"):
                send(sender, np.full(EAGER // 8, -1.0), 1, timeout=0)
            assert matcher.credits[1].available == before
    works.append(isend(sender, np.array([-2.0] * (EAGER // 8)), 1))
    for number in [*range(len(works) - 1), -2]:
        got = np.zeros(EAGER // 8)
        recv(receiver, got, 0)
        assert (got == number).all()
    for work in works:
        work.wait()


@pytest.mark.parametrize("count", [EAGER // 8 - 1, EAGER // 8])
def test_a_message_with_a_posted_receive_goes_straight_into_its_array(pair: World, count: int) -> None:
    """Whether all of it came with its header, or the rest was received later; alternating with others."""
    sender, receiver = pair.communicators
    for turn in range(20):
        first, second, other = np.zeros(count), np.zeros(count), np.zeros(3)
        works = [irecv(receiver, first, 0), irecv(receiver, second, ANY), irecv(receiver, other, 0, 1)]
        send(sender, np.full(3, -1.0), 1, 1)
        send(sender, np.full(count, float(turn)), 1)
        send(sender, np.full(count, turn + 0.5), 1)
        for work in works:
            work.wait()
            assert work.source_rank() == 0
        assert (first == turn).all()
        assert (second == turn + 0.5).all()
        assert (other == -1).all()
    wrong = np.zeros(count)
    refused = irecv(receiver, wrong, 0, 2)
    send(sender, np.full(count, 7, np.float32), 1, 2)
    with pytest.raises(DistBackendError, match=rf"rank 0 sent float32\[{count}\]"):
        refused.wait()
    assert not wrong.any()


# One rank's side alone: the frames that it sends


class Wire:
    """An engine that keeps the headers of what is sent."""

    rank, eager_limit, epoch, on_demand = 9, EAGER, 1, False

    def __init__(self) -> None:
        self.sent: list[frames.Header] = []
        self.misfits: list[str] = []

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
    return MessageMatcher(wire, 1, lambda rank: rank, wire.misfits.append)  # type: ignore[arg-type]


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
    assert wire.misfits == [str(received.error)]
    assert not wire.sent
