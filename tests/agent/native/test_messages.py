"""Short messages: those that the compiled core carries, and those that it leaves to the Python code untouched."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.threads import NOW, World, world

from rankmesh_agent import native
from rankmesh_agent.progress.matching import WINDOW
from rankmesh_agent.progress.message_queues import ANY
from rankmesh_agent.wire.errors import DistBackendError, DistNetworkError, GroupAbortedError

pytestmark = pytest.mark.skipif(native.core is None, reason=f"the compiled core does not run: {native.reason}")

EAGER = 1 << 12  # as support.threads sets it
SEND, RECV = True, False


@pytest.fixture
def pair() -> Iterator[World]:
    with world(2, "segment") as made:
        yield made


def at_once(pair: World, rank: int, way: bool, array: Any, tag: Any = 0, other: Any = None) -> bool:
    """Make a call of the core; if it leaves the message to the Python code, it has changed nothing."""
    comm = pair.communicators[rank]
    assert comm.message_at_once is not None
    before = state_of(pair, rank)
    done = comm.message_at_once(way, array, 1 - rank if other is None else other, tag)
    assert done or state_of(pair, rank) == before
    return done


def state_of(pair: World, rank: int) -> Any:
    engine, matcher = pair.meshes[rank], pair.communicators[rank].matcher
    peer, credit = engine.rings[1 - rank], matcher.credits[1 - rank]
    rings = peer.connection._in, peer.connection._out
    counters = [(ring.position, ring.words.tobytes(), ring.data.tobytes()) for ring in rings]
    return counters, credit.available, credit.unreturned, len(list(pair.recorders[rank].latest.copy()))


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float64, np.int8, np.bool_, np.complex64, np.float16, ml_dtypes.bfloat16]
)
@pytest.mark.parametrize("count", [0, 1, 100, 512])
def test_what_it_carries(pair: World, dtype: Any, count: int) -> None:
    sent, received = np.arange(count).astype(dtype), np.zeros(count, dtype)
    for number in range(400):  # beyond the rings' ends
        sender = number // 200
        back = pair.meshes[sender].rings[1 - sender].connection._in.words
        before = back.tobytes()
        assert at_once(pair, sender, SEND, sent, -7)
        assert at_once(pair, 1 - sender, RECV, received, -7)
        assert received.tobytes() == sent.tobytes()
        assert back.tobytes() == before
        received[:] = 0
    credit = pair.communicators[0].matcher.credits[1]
    cost = 200 * max(sent.nbytes, 1024)
    assert (credit.available, credit.unreturned) == (WINDOW - cost, cost)
    for rank, op in enumerate(["recv", "send"]):
        messages = pair.communicators[rank].messages
        stats = messages.op_stats()[op]
        assert (stats.nbytes, sum(stats.buckets), stats.failures) == (200 * sent.nbytes, 200, 0)
        record = pair.recorders[rank].latest[-1]
        assert record[:3] == (messages.state, (op, sent.dtype, count, 1 - rank, -7), 0)
        assert record[5:] == ("", sent.nbytes)


def test_each_end_may_be_python(pair: World) -> None:
    one, other = pair.communicators
    sent, received = np.arange(9.0), np.zeros(9)
    one.send(sent, 1, 3, NOW)
    assert at_once(pair, 1, RECV, received, 3)
    assert at_once(pair, 0, SEND, sent * 2, 3)
    assert other.receive(sent, 0, 3, NOW) == 0
    assert (received * 2 == sent).all()


def read_only() -> Any:
    array = np.ones(4)
    array.flags.writeable = False
    return array


NOT_KNOWN: dict[str, tuple[Any, ...]] = {
    "strided": (np.ones(8)[::2],),
    "2-D": (np.ones((2, 2)),),
    "unaligned": (np.ones(17, np.uint8)[1:].view(np.float64),),
    "subclass": (np.ones(4).view(type("Other", (np.ndarray,), {})),),
    "read-only": (read_only(),),
    "list": ([1.0] * 4,),
    "other order": (np.ones(4, ">f8"),),
    "objects": (np.ones(4, object),),
    "padded": (np.ones(4, np.longdouble),),
    "long": (np.ones(EAGER // 8 + 1),),
    "tag of NumPy": (np.ones(4), np.int64(0)),
    "wide tag": (np.ones(4), 1 << 63),
    "tag of bool": (np.ones(4), True),
    "rank of NumPy": (np.ones(4), 0, np.int64(0)),
    "itself": (np.ones(4), 0, 1),
    "no rank": (np.ones(4), 0, 2),
    "any rank": (np.ones(4), 0, ANY),
}


@pytest.mark.parametrize("arguments", NOT_KNOWN.values(), ids=NOT_KNOWN)
def test_arguments_that_it_does_not_know(pair: World, arguments: tuple[Any, ...]) -> None:
    assert not at_once(pair, 1, RECV, *arguments)


def fail(pair: World) -> None:
    pair.communicators[1].state.failure = DistNetworkError("gone")


def post(pair: World) -> None:
    pair.communicators[1].matcher.receives.queues[0, 5] = deque()


def keep(pair: World) -> None:
    pair.communicators[1].matcher.unexpected.queues[0, 5] = deque()


def lose(pair: World) -> None:
    pair.meshes[1].rings[0].connection._lost = DistNetworkError("gone")


def drive(pair: World) -> None:
    pair.meshes[1].driven = True


def receive_a_part(pair: World) -> None:
    pair.meshes[1].rings[0]._end = 1


def owe_credit(pair: World) -> None:
    pair.communicators[1].matcher.credits[0].unreturned = (1 << 20) - 1


@pytest.mark.parametrize("prepare", [fail, post, keep, lose, drive, receive_a_part, owe_credit])
def test_when_a_receive_is_not_its_own(pair: World, prepare: Callable[[World], None]) -> None:
    assert at_once(pair, 0, SEND, np.ones(4))
    prepare(pair)
    try:
        assert not at_once(pair, 1, RECV, np.zeros(4))
    finally:
        pair.meshes[1].driven = False
        pair.meshes[1].rings[0]._end = 0


@pytest.mark.parametrize(("tag", "dtype", "count"), [(1, np.float64, 4), (0, np.int64, 4), (0, np.float64, 3)])
def test_the_next_message_is_another(pair: World, tag: int, dtype: Any, count: int) -> None:
    received = np.zeros(count, dtype)
    assert at_once(pair, 0, SEND, np.ones(4))
    assert not at_once(pair, 1, RECV, received, tag)
    assert not received.any()


def test_a_message_that_does_not_come_whole(pair: World) -> None:
    ring = pair.meshes[0].rings[1].connection._out
    assert at_once(pair, 0, SEND, np.ones(4))
    ring.words[0] -= 1
    assert not at_once(pair, 1, RECV, np.zeros(4))
    ring.words[0] += 1
    assert at_once(pair, 1, RECV, np.zeros(4))


def queue(pair: World) -> None:
    pair.meshes[0].rings[1].outgoing.append(((b"x",), None))


def spend_credit(pair: World) -> None:
    pair.communicators[0].matcher.credits[1].available = 1023


def fill(pair: World) -> None:
    while at_once(pair, 0, SEND, np.ones(EAGER // 8)):
        pass


@pytest.mark.parametrize("prepare", [queue, spend_credit, fill])
def test_when_a_send_is_not_its_own(pair: World, prepare: Callable[[World], None]) -> None:
    prepare(pair)
    assert not at_once(pair, 0, SEND, np.ones(EAGER // 8))
    ring = pair.meshes[0].rings[1].connection._out
    assert ring.position - ring.words[8] <= ring.capacity
    pair.meshes[0].rings[1].outgoing.clear()


def test_another_thread_has_the_engine(pair: World) -> None:
    taken, done = threading.Event(), threading.Event()

    def take() -> None:
        with pair.meshes[0].lock:
            taken.set()
            done.wait(10)

    thread = threading.Thread(target=take)
    thread.start()
    taken.wait(10)
    assert not at_once(pair, 0, SEND, np.ones(4))
    done.set()
    thread.join()
    assert at_once(pair, 0, SEND, np.ones(4))


def test_a_message_that_does_not_fit_is_refused(pair: World) -> None:
    assert at_once(pair, 0, SEND, np.ones(4))
    wanted = np.zeros(4, np.float32)
    why = r"rank 0 sent float64\[4\] with tag 0, but the receive expects float32\[4\]"
    assert not at_once(pair, 1, RECV, wanted)
    with pytest.raises(DistBackendError, match=why):
        pair.communicators[1].receive(wanted, 0, 0, NOW)
    assert not at_once(pair, 1, SEND, np.ones(4))
    with pytest.raises(GroupAbortedError, match=why):
        pair.communicators[0].receive(wanted, 1, 0, NOW)


def test_a_sleeping_rank_is_woken(pair: World) -> None:
    received = np.zeros(4)
    thread = threading.Thread(target=pair.communicators[1].receive, args=(received, 0, 0, NOW))
    thread.start()
    sleeps = pair.meshes[0].rings[1].connection._out.words
    while not sleeps[16]:
        threading.Event().wait(0.001)
    assert at_once(pair, 0, SEND, np.ones(4))
    assert not sleeps[16]
    thread.join(10)
    assert not thread.is_alive()
    assert received.all()


def test_members_with_other_numbers(pair: World) -> None:
    """After a shrink, the peers have other global ranks: the old ones are unknown."""
    array = np.ones(4)
    assert at_once(pair, 0, SEND, array)
    pair.communicators[0].set_global_ranks((7, 5))
    assert not at_once(pair, 0, SEND, array, other=1)
    assert at_once(pair, 0, SEND, array, other=5)
