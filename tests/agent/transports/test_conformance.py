"""What every transport promises, asked of each of them."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import threading
import time

import pytest
from support.certificates import in_environment, required
from support.connecting import connect, dial, look, meet, recv_exactly, send_all, wait_ready
from support.threads import ORDERED, TRANSPORTS, in_threads, transport_named

from rankmesh_agent.net import tls
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.shared_memory import mapping
from rankmesh_agent.transports.base import Connection
from rankmesh_agent.transports.tcp import IDENTITY_BYTES
from rankmesh_agent.wire.errors import AddressInUseError, AuthenticationError, DistNetworkError

PIECE = bytes(range(256)) * 256
MOST_BUFFERED = 64 << 20


@pytest.fixture(params=[*TRANSPORTS, ORDERED, "tls", "tls of the token"])
def name(request):
    return request.param


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture
def transport(name, shm, certificates, monkeypatch):
    if name == "tls of the token":
        monkeypatch.setattr(tls, "is_trusted_listener", lambda host, port: False)
        return transport_named("tcp")
    if name == "ordered":
        monkeypatch.setattr(mapping, "TOTAL_STORE_ORDER", False)
    if name != "tls":
        return transport_named(name)
    with in_environment(required(certificates)):
        return transport_named("tcp")


@pytest.fixture
def listener(transport):
    made = transport.listen("127.0.0.1:0")
    yield made
    made.close()


@pytest.fixture
def ends(transport, listener):
    connecting, accepting = connect(transport, listener)
    yield connecting, accepting
    connecting.close()
    accepting.close()


@pytest.fixture(params=["connecting", "accepting"])
def one_and_other(request, ends):
    """Return both ends, each once in each role."""
    return ends if request.param == "connecting" else ends[::-1]


def fill(connection: Connection) -> int:
    """Send until nothing more is taken, nor a moment later (the kernel moves bytes on); return how many bytes were."""
    taken = refused = 0
    while refused < 2 and taken < MOST_BUFFERED:
        sent = connection.send([PIECE])
        taken += sent
        refused = 0 if sent else refused + 1
        if refused == 1:
            time.sleep(0.02)
    return taken


def send_until_it_fails(connection: Connection) -> None:
    deadline = Deadline(10)
    while not deadline.expired():
        send_all(connection, PIECE, deadline)


@contextlib.contextmanager
def meanwhile(function, *arguments):
    """Call a function while the block, which has begun to wait by then or does not, runs."""
    timer = threading.Timer(0.02, function, arguments)
    timer.start()
    try:
        yield
    finally:
        timer.join()


def wait_until(condition, seconds: float = 20.0) -> bool:
    deadline = Deadline(seconds)
    while not condition() and not deadline.expired():
        time.sleep(0.005)
    return condition()


# Bytes


def converse(connection: Connection, saying: bytes, hears: int, seed: int) -> bytes:
    """Send in scattered buffers and receive in odd pieces, both as it comes; return what was heard."""
    dice = random.Random(seed)
    deadline = Deadline(30)
    unsaid, heard = memoryview(saying), bytearray(hears)
    unheard = memoryview(heard)
    while unsaid or unheard:
        moved = 0
        if unsaid:
            ends = sorted(dice.randrange(min(len(unsaid), 200_000) + 1) for _ in range(dice.randrange(1, 6)))
            moved = connection.send([unsaid[begin:end] for begin, end in zip([0, *ends], ends, strict=False)])
            assert 0 <= moved <= ends[-1]
            unsaid = unsaid[moved:]
            moved += ends[-1] == 0  # nothing was offered
        if unheard:
            received = connection.recv_into(unheard[: dice.randrange(1, 200_000)])
            unheard = unheard[received:]
            moved += received
        if not moved and (unsaid or unheard):
            wait_ready(connection, deadline, writing=bool(unsaid))
    return bytes(heard)


@pytest.mark.parametrize(
    ("there", "back"), [(1, 0), (0, 65_537), (300, 40_000), (3_000_001, 5_000_000), (777, 4_194_304)]
)
def test_bytes_arrive_whole_and_in_order_both_ways_at_once(ends, there, back):
    dice = random.Random(there)
    says = dice.randbytes(there), dice.randbytes(back)
    heard = in_threads(2, lambda side: converse(ends[side], says[side], len(says[1 - side]), side))
    assert heard[1] == says[0]
    assert heard[0] == says[1]


def test_buffers_of_all_kinds_and_many_of_them(one_and_other):
    one, other = one_and_other
    for kind in (bytes, memoryview, lambda data: memoryview(bytearray(data))):
        assert one.send([kind(b"ab"), kind(b""), kind(b"cde")]) == 5
        assert recv_exactly(other, 5, Deadline(10)) == b"abcde"
    data = random.Random(0).randbytes(3000)
    unsent, deadline = data, Deadline(10)
    while unsent:
        unsent = unsent[one.send([unsent[at : at + 1] for at in range(len(unsent))]) :]
        assert not deadline.expired()
    assert recv_exactly(other, len(data), deadline) == data


def test_transfers_without_bytes(one_and_other):
    one, other = one_and_other
    assert [one.send([]), one.send([b""]), other.recv_into(memoryview(bytearray(10)))] == [0, 0, 0]
    assert other.recv_into(memoryview(bytearray())) == 0
    send_all(one, b"here", Deadline(10))
    assert other.recv_into(memoryview(bytearray())) == 0
    assert recv_exactly(other, 4, Deadline(10)) == b"here"


def test_a_full_connection_receives_and_sends_again_after_a_read(one_and_other):
    one, other = one_and_other
    taken = fill(one)
    assert 0 < taken < MOST_BUFFERED
    send_all(other, b"answer", Deadline(10))
    assert recv_exactly(one, 6, Deadline(10)) == b"answer"
    committed = one.committed()
    with meanwhile(recv_exactly, other, taken + committed, Deadline(10)):
        send_all(one, bytes(committed) + b"more", Deadline(10))
    assert recv_exactly(other, 4, Deadline(10)) == b"more"


def test_connections_at_one_listener_do_not_mix(transport, listener):
    connecting, arrived = meet([transport.dial(listener.address, bytes([number])) for number in range(10)], listener)
    accepting = {identity[0]: connection for identity, connection in arrived}
    for number, connection in enumerate(connecting):
        send_all(connection, bytes([number]), Deadline(10))
    for number, connection in enumerate(connecting):
        assert recv_exactly(accepting[number], 1, Deadline(10)) == bytes([number])
        connection.close()
        accepting[number].close()


# Waiting


def test_no_wakeup_is_missed(one_and_other):
    one, other = one_and_other
    sizes = [int(2 ** random.Random(burst).uniform(0, 17)) for burst in range(500)]

    def burst(side: int) -> None:
        for size in sizes:
            if side == 0:
                send_all(one, PIECE[:1] * size, Deadline(20))
                recv_exactly(one, 1, Deadline(20))
            else:
                recv_exactly(other, size, Deadline(20))
                send_all(other, b"!", Deadline(20))

    in_threads(2, burst)


# The end of a connection


@pytest.mark.parametrize("full", [False, True])
def test_bytes_sent_before_the_close_are_received(one_and_other, full):
    one, other = one_and_other
    sent = fill(one) if full else one.send([PIECE])
    one.close()
    assert recv_exactly(other, sent, Deadline(10)).startswith(PIECE)
    with pytest.raises(DistNetworkError, match="lost"):
        recv_exactly(other, 1 << 20, Deadline(10))  # of a batch of TLS, a part may have been sent


def test_what_was_sent_is_received_also_when_the_closing_side_left_something_unread(one_and_other):
    one, other = one_and_other
    send_all(other, b"nobody reads this", Deadline(10))
    wait_ready(one, Deadline(10), writing=False)
    taken = fill(one)
    one.close()
    recv_exactly(other, taken, Deadline(10))


def test_who_finishes_before_closing_is_heard_by_a_peer_that_goes_on_talking(one_and_other):
    one, other = one_and_other
    data, deadline = random.Random(0).randbytes(5_000_000), Deadline(20)

    def say_and_leave(side: int) -> bytes:
        if side == 0:
            send_all(one, data, deadline)
            assert wait_until(one.drain, 20)
            one.close()
            return b""
        heard = bytearray(len(data))
        unheard = memoryview(heard)
        while unheard:
            with contextlib.suppress(DistNetworkError):  # it may be gone by now
                other.send([b"but" * 1000])
            received = other.recv_into(unheard[:100_000])
            unheard = unheard[received:]
            if not received:
                wait_ready(other, deadline, writing=False)
        return bytes(heard)

    assert in_threads(2, say_and_leave)[1] == data


def test_a_forked_child_lets_go_of_a_connection_unnoticed(ends):
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    for one, other in (ends, ends[::-1]):
        send_all(one, b"still here", Deadline(10))
        assert recv_exactly(other, 10, Deadline(10)) == b"still here"


def test_a_reader_asleep_wakes_when_the_other_side_closes(one_and_other):
    one, other = one_and_other
    with meanwhile(one.close), pytest.raises(DistNetworkError, match="lost"):
        recv_exactly(other, 1, Deadline(10))


def test_a_writer_asleep_wakes_when_the_other_side_closes(one_and_other):
    one, other = one_and_other
    fill(one)
    with meanwhile(other.close), pytest.raises(DistNetworkError, match="lost"):
        send_until_it_fails(one)


def test_a_lost_connection_stays_lost(one_and_other):
    one, other = one_and_other
    other.close()
    for _ in range(3):
        with pytest.raises(DistNetworkError, match="lost") as caught:
            recv_exactly(one, 1, Deadline(10))
        assert caught.value.address == one.peer


def test_a_closed_end_neither_sends_nor_receives(one_and_other):
    one, _ = one_and_other
    one.close()
    with pytest.raises(DistNetworkError):
        one.send([b"!"])
    with pytest.raises(DistNetworkError):
        one.recv_into(memoryview(bytearray(1)))


# Listening and connecting


def take_turns(attempt, listener, turns: int):
    """Go on with both sides some times; return the connection of each, as far as they have come."""
    made, arrived = None, []
    for _ in range(turns):
        made = made or attempt.advance()
        arrived += look(listener)
    return made, arrived


def test_connecting_to_nobody(transport, listener):
    listener.close()
    with pytest.raises(DistNetworkError, match=f"cannot connect to {listener.address}"):
        dial(transport, listener.address)


@pytest.mark.parametrize("identity", [b"", b"hello", bytes(range(IDENTITY_BYTES))])
def test_who_comes_says_who_it_is(transport, listener, identity):
    asked = []

    def admits(identity: bytes) -> bool:
        asked.append(identity)
        return True

    (connecting,), ((reported, accepting),) = meet(
        [transport.dial(listener.address, identity)], listener, admits=admits
    )
    with contextlib.closing(connecting), contextlib.closing(accepting):
        assert asked == [reported] == [identity.ljust(IDENTITY_BYTES, b"\0")]


def test_who_is_not_admitted_is_told_and_is_no_arrival(transport, listener, shm):
    for _ in range(2):
        with pytest.raises(DistNetworkError, match="does not wait for this rank") as caught:
            meet([transport.dial(listener.address, b"me")], listener, arrivals=0, admits=lambda identity: False)
        assert not isinstance(caught.value, AuthenticationError)
    assert list(shm.iterdir()) == []
    for closes in connect(transport, listener):
        closes.close()


def test_many_come_and_some_are_admitted(transport, listener):
    attempts = [transport.dial(listener.address, bytes([number])) for number in range(20)]
    made, arrived, refused = [], [], 0
    deadline = Deadline(10)
    while len(arrived) + refused < 20 or len(made) < 10:
        arrived += look(listener, lambda identity: identity[0] % 2 == 0)
        for attempt in list(attempts):
            try:
                connection = attempt.advance()
            except DistNetworkError:
                refused += 1
                attempt.close()
                attempts.remove(attempt)
            else:
                if connection is not None:
                    made.append(connection)
                    attempts.remove(attempt)
        assert not deadline.expired()
    assert sorted(identity[0] for identity, _ in arrived) == list(range(0, 20, 2))
    for connection in [*made, *(connection for _, connection in arrived)]:
        connection.close()


def test_an_address_in_use_is_refused(transport, listener):
    with pytest.raises(AddressInUseError, match="in use"):
        transport.listen(listener.address)


def test_a_second_close_does_nothing(transport, listener, ends):
    for closes in (*ends, *ends, listener):
        closes.close()
    again = transport.listen(listener.address)
    listener.close()
    for closes in (*connect(transport, again), again):
        closes.close()


def test_accepting_at_a_closed_listener(listener):
    listener.close()
    for _ in range(2):
        with pytest.raises(DistNetworkError, match=f"the listener at {listener.address} is closed"):
            look(listener)


def test_connections_outlive_their_listener(ends, listener):
    listener.close()
    send_all(ends[0], b"still here", Deadline(10))
    assert recv_exactly(ends[1], 10, Deadline(10)) == b"still here"


@pytest.mark.parametrize("turns", range(4))
def test_closing_a_listener_closes_what_is_under_way(transport, listener, turns):
    attempt = transport.dial(listener.address)
    made, arrived = take_turns(attempt, listener, turns)
    listener.close()
    for _, connection in arrived:
        connection.close()
    with contextlib.closing(made or attempt), pytest.raises(DistNetworkError):
        recv_exactly(made or meet([attempt])[0][0], 1, Deadline(10))


# Nothing is left behind


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def our_threads() -> int:
    return sum(thread.name.startswith("rankmesh-") for thread in threading.enumerate())


def use_and_close(transport) -> None:
    listener = transport.listen("127.0.0.1:0")
    connecting, accepting = connect(transport, listener)
    send_all(connecting, b"!", Deadline(10))
    assert recv_exactly(accepting, 1, Deadline(10)) == b"!"
    for closes in (connecting, accepting, listener):
        closes.close()


def test_nothing_is_left_after_closing(transport, shm):
    gc.collect()
    use_and_close(transport)
    before = descriptors(), our_threads()
    for _ in range(20):
        use_and_close(transport)
    assert wait_until(lambda: descriptors() <= before[0]), os.listdir("/proc/self/fd")
    assert wait_until(lambda: our_threads() <= before[1]), threading.enumerate()
    assert list(shm.iterdir()) == []


def test_nothing_is_left_of_unclaimed_and_half_closed_connections(transport, shm):
    def leave(seed: int) -> None:
        listener = transport.listen("127.0.0.1:0")
        attempt = transport.dial(listener.address)
        if seed % 2:
            made, arrived = take_turns(attempt, listener, seed // 2)  # given up at every stage
            ours = [made or attempt, *(connection for _, connection in arrived)]
            for closes in (listener, *ours) if seed % 4 == 1 else (*ours, listener):
                closes.close()
        else:
            (connecting,), ((_, accepting),) = meet([attempt], listener)
            connecting.close()
            listener.close()
            accepting.close()

    gc.collect()
    leave(0)
    before = descriptors()
    for seed in range(20):
        leave(seed)
    assert wait_until(lambda: descriptors() <= before), os.listdir("/proc/self/fd")
    assert list(shm.iterdir()) == []


def test_nothing_waits_for_the_garbage_collector(transport):
    def lose() -> None:
        listener = transport.listen("127.0.0.1:0")
        connecting, accepting = connect(transport, listener)
        connecting.close()
        try:
            recv_exactly(accepting, 1, Deadline(10))
        except DistNetworkError:
            accepting.close()
        listener.close()

    lose()
    gc.collect()
    gc.disable()
    try:
        before = descriptors()
        for _ in range(10):
            lose()
        assert wait_until(lambda: descriptors() <= before), f"{descriptors() - before} descriptors more"
    finally:
        gc.enable()
