"""Shared memory between two processes: how it is agreed on, refused and used up."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import select
import subprocess
import sys

import pytest
from support.connecting import connect, dial, meet, recv_exactly, send_all, wait_ready
from support.threads import in_threads

from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.shared_memory.mapping import CACHE_LINE, Mapping
from rankmesh_agent.transports import shm_ring
from rankmesh_agent.transports.shm_ring import RingTransport
from rankmesh_agent.transports.tcp import PROPOSAL, Proposal, TcpTransport
from rankmesh_agent.wire.errors import DistNetworkError

_LINES = 4 * CACHE_LINE
WITH_SUPPORT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
"""What lets another process import what this one can."""


@pytest.fixture
def transport(shm):
    return RingTransport("secret", str(shm), "job")


@pytest.fixture
def listener(transport):
    made = transport.listen("127.0.0.1:0")
    yield made
    made.close()


@contextlib.contextmanager
def connected(transport, listener):
    connecting, accepting = connect(transport, listener)
    with contextlib.closing(connecting), contextlib.closing(accepting):
        yield connecting, accepting


def check_they_talk(one, other) -> None:
    for speaker, hearer in ((one, other), (other, one)):
        send_all(speaker, b"hello", Deadline(10))
        assert recv_exactly(hearer, 5, Deadline(10)) == b"hello"


# Agreement


def test_processes_of_one_host_share_memory(transport, listener, shm):
    with connected(transport, listener) as (one, other):
        assert (one.medium, other.medium) == ("segment", "segment")
        assert list(shm.iterdir()) == []
        check_they_talk(one, other)


def test_another_process_shares_memory_until_it_dies(listener, shm):
    program = f"""if True:
        import os
        from support.connecting import dial, recv_exactly, send_all
        from rankmesh_agent.transports.shm_ring import RingTransport
        from rankmesh_agent.net.deadline import Deadline
        transport = RingTransport("secret", {str(shm)!r}, "job", ring_bytes=5000, strict=True)
        connection = dial(transport, {listener.address!r})
        send_all(connection, recv_exactly(connection, 1_000_000, Deadline(20))[::-1], Deadline(20))
        os.kill(os.getpid(), 9)"""
    child = subprocess.Popen([sys.executable, "-c", program], env=WITH_SUPPORT)
    data = random.Random(0).randbytes(1_000_000)
    try:
        _, ((_, connection),) = meet([], listener, arrivals=1, seconds=20)
        with contextlib.closing(connection):
            send_all(connection, data, Deadline(20))
            assert recv_exactly(connection, len(data), Deadline(20)) == data[::-1]
            with pytest.raises(DistNetworkError, match="lost"):
                recv_exactly(connection, 1, Deadline(20))
    finally:
        child.kill()
        child.wait()
    assert list(shm.iterdir()) == []


# Falling back to TCP


def elsewhere(shm, **options):
    """Return a transport that sees another directory."""
    (shm / "elsewhere").mkdir()
    return RingTransport("secret", str(shm / "elsewhere"), "job", **options)


def test_who_sees_another_directory_stays_on_tcp(listener, shm):
    with connected(elsewhere(shm), listener) as (one, other):
        assert (one.medium, other.medium) == ("tcp", "tcp")
        check_they_talk(one, other)
    assert list((shm / "elsewhere").iterdir()) == []


def test_who_sees_another_directory_and_must_share_says_so(transport, listener, shm):
    with pytest.raises(DistNetworkError, match="both ranks must see the same RANKMESH_SHM_DIR") as caught:
        dial(elsewhere(shm, strict=True), listener.address, listener)
    assert caught.value.address == listener.address
    assert list((shm / "elsewhere").iterdir()) == []


def test_a_ring_transport_and_a_tcp_transport_connect_over_tcp(transport, listener):
    tcp = TcpTransport("secret")
    with contextlib.closing(tcp.listen("127.0.0.1:0")) as plain:
        for dialing, listening in ((tcp, listener), (transport, plain)):
            with connected(dialing, listening) as (one, other):
                assert (one.medium, other.medium) == ("tcp", "tcp")
                check_they_talk(one, other)


def no_room(monkeypatch, shm) -> str:
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    return str(shm)


def no_memory_order(monkeypatch, shm) -> str:
    monkeypatch.setattr(
        shm_ring, "unsupported", lambda: "shared memory needs the memory order of x86-64, this is s390x"
    )
    return str(shm)


def no_directory(monkeypatch, shm) -> str:
    return str(shm / "missing")


@pytest.mark.parametrize(
    ("hindrance", "reason"),
    [
        (no_room, r"has no room for 0 MiB .*--shm-size"),
        (no_memory_order, "this is s390x"),
        (no_directory, r"cannot make shared memory in .*/missing: No such file or directory"),
    ],
)
def test_without_memory_the_connection_stays_on_tcp_or_raises(listener, shm, monkeypatch, hindrance, reason):
    directory = hindrance(monkeypatch, shm)
    with connected(RingTransport("secret", directory, "job"), listener) as (one, other):
        assert (one.medium, other.medium) == ("tcp", "tcp")
        check_they_talk(one, other)
    with pytest.raises(DistNetworkError, match=reason):
        dial(RingTransport("secret", directory, "job", strict=True), listener.address, listener)
    assert list(shm.iterdir()) == []


# Proposals that are not what they say


class Proposing(TcpTransport, Proposal):
    """Knows the token, and proposes whatever it is told to; keeps whether that was taken."""

    def __init__(self, *proposal) -> None:
        super().__init__("secret")
        self.proposal = PROPOSAL.pack(*proposal)

    def _offer(self):
        return self

    def resolve(self, connection, accepted):
        self.taken = accepted
        return connection


def check_it_is_refused(listener, *proposal) -> None:
    proposing = Proposing(*proposal)
    with connected(proposing, listener) as (one, other):
        assert not proposing.taken
        assert other.medium == "tcp"
        check_they_talk(one, other)


SIZE = 1 << 12


@pytest.fixture
def file(shm):
    """Return shared memory of the right size for rings of SIZE bytes, whose nonce is 'nonce'."""
    mapping = Mapping.create(str(shm), "job", 2 * (_LINES + SIZE))
    mapping.bytes[_LINES : _LINES + 5] = list(b"nonce")
    return mapping


def test_an_honest_proposal_is_taken(listener, file):
    proposing = Proposing(1, SIZE, file.name.encode(), b"nonce")
    with connected(proposing, listener) as (_, other):
        assert proposing.taken
        assert other.medium == "segment"


@pytest.mark.parametrize(
    "handle",
    [
        *(b"../../etc/passwd", b"/etc/passwd", b"rankmesh-../../../etc/passwd", b"rankmesh-a/../rankmesh-b"),
        *(b"rankmesh-" + b"a" * 151, b"rankmesh-\xff", b"rankmesh-a\0b", b"rankmesh-a\n"),
        *(b"rankmesh-", b"rankmesh-job-1.0123456789abcdef", b".", b""),
    ],
)
def test_a_handle_that_is_none_of_ours_is_refused(listener, handle):
    check_it_is_refused(listener, 1, SIZE, handle, b"nonce")


def test_the_handle_of_a_file_that_is_gone_is_refused(listener, file):
    file.release()
    check_it_is_refused(listener, 1, SIZE, file.name.encode(), b"nonce")


@pytest.mark.parametrize("size", [0, 1, SIZE - 1, SIZE + 1, 1 << 30, (1 << 30) + 1, 1 << 63, (1 << 64) - 1])
def test_another_size_is_refused(listener, file, size):
    check_it_is_refused(listener, 1, size, file.name.encode(), b"nonce")


def test_another_file_of_the_same_name_is_refused(listener, file):
    check_it_is_refused(listener, 1, SIZE, file.name.encode(), b"other")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/etc/passwd", path)])
def test_what_is_no_plain_file_is_refused(listener, shm, file, make):
    name = file.name
    file.release()
    make(shm / name)
    check_it_is_refused(listener, 1, SIZE, name.encode(), b"nonce")


# Going round


@pytest.mark.parametrize("ring_bytes", [CACHE_LINE, 1000, 1 << 17])
def test_a_ring_goes_round_and_round(transport, listener, shm, ring_bytes):
    small = RingTransport("secret", str(shm), "job", ring_bytes=ring_bytes, strict=True)
    dice = random.Random(ring_bytes)
    sizes = [dice.randrange(1, 3 * ring_bytes) for _ in range(60)]
    data = dice.randbytes(sum(sizes))

    with connected(small, listener) as ends:

        def say_or_hear(side: int) -> bytes:
            heard, at = b"", 0
            for size in sizes:
                if side == 0:
                    send_all(ends[0], data[at : at + size], Deadline(20))
                    at += size
                else:
                    heard += recv_exactly(ends[1], size, Deadline(20))
            return heard

        assert in_threads(2, say_or_hear)[1] == data


@pytest.mark.parametrize("ring_bytes", [CACHE_LINE, 1000])
def test_a_ring_takes_exactly_what_it_holds(listener, shm, ring_bytes):
    with connected(RingTransport("secret", str(shm), "job", ring_bytes=ring_bytes), listener) as (one, other):
        for _ in range(5):
            assert one.send([bytes(ring_bytes // 2), b"ab", bytes(ring_bytes)]) == ring_bytes
            assert one.send([b"!"]) == 0
            assert other.recv_into(memoryview(bytearray(7))) == 7
            assert one.send([bytes(100)]) == 7
            assert other.recv_into(memoryview(bytearray(2 * ring_bytes))) == ring_bytes
            assert other.recv_into(memoryview(bytearray(1))) == 0


def test_a_frame_is_taken_if_it_is_the_next_one_and_whole(listener, shm):
    into = memoryview(bytearray(4))
    with connected(RingTransport("secret", str(shm), "job", ring_bytes=1000), listener) as (one, other):
        assert not other.take(b"head", into)
        one.send([b"headda"])
        assert not other.take(b"head", into), "the rest is missing"
        assert into == b"da\0\0"
        one.send([b"ta"])
        assert not other.take(b"tail", into)
        assert other.take(b"head", into)
        assert into == b"data"
        for before, length, taken in ((0, 986, True), (500, 496, False)):  # it goes round the end, and its head does
            for buffers in ([bytes(before)], [bytes(length), b"headmore"]):
                one.send(buffers)
                assert recv_exactly(other, len(buffers[0]), Deadline(10)) == buffers[0]
            assert other.take(b"head", into) == taken
            assert into == b"more"
        assert recv_exactly(other, 8, Deadline(10)) == b"headmore"


def test_who_only_looks_around_is_not_rung_for(transport, listener):
    with connected(transport, listener) as (one, other):
        assert not one.has_work(writing=False)
        assert one.has_work(writing=True), "there is room"
        other.send([b"!"])
        assert one.has_work(writing=False)
        poller = select.poll()
        poller.register(one.fileno(), one.events(False))
        assert poller.poll(50) == []
        assert recv_exactly(one, 1, Deadline(10)) == b"!"
        assert one.prepare_wait(writing=False)
        other.send([b"!"])
        assert poller.poll(10_000), "who sleeps is"


def test_who_may_sleep_is_told_at_the_last_moment(transport, listener):
    with connected(transport, listener) as (one, other):
        assert one.prepare_wait(writing=False)
        assert not one.prepare_wait(writing=True), "there is room"
        other.send([b"!"])
        assert not one.prepare_wait(writing=False), "there is something to receive"
        wait_ready(one, Deadline(10), writing=False)
        assert recv_exactly(one, 1, Deadline(10)) == b"!"
        assert one.prepare_wait(writing=False)
        other.close()
        with pytest.raises(DistNetworkError):
            recv_exactly(one, 1, Deadline(10))
        assert not one.prepare_wait(writing=False), "the connection is lost"


def test_memory_is_not_exposed_by_a_peer_that_is_gone(transport, listener):
    """Its pid may be another process's by now: what was read may be anything."""
    with connected(transport, listener) as (one, other):
        other.send([b"!"])
        assert one.still_exposed(0)
        other._doorbell.close()  # as the end of its process does
        assert not one.still_exposed(0)
