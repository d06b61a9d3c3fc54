"""Limits of connections that wait for their clients."""

from __future__ import annotations

import logging
import resource
import socket
from collections.abc import Iterator

import pytest

from rankmesh_agent.net import admission
from rankmesh_agent.net.admission import ConnectionLimit


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> ConnectionLimit:
    monkeypatch.setattr(admission, "_MIN_CONNECTIONS", 1)
    monkeypatch.setattr(admission, "_MIN_SECONDS", 0.0)
    return ConnectionLimit("test connections", 1, 2)


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    made = [socket.socketpair() for _ in range(5)]
    yield made
    for pair in made:
        for sock in pair:
            sock.close()


def is_shut(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return not sock.recv(1)
    except BlockingIOError:
        return False


def test_the_one_that_has_waited_longest_makes_room(limit, pairs):
    first, _ = (limit.admit(ours) for ours, _ in pairs[:2])
    first.renew()
    limit.admit(pairs[2][0])
    assert [is_shut(theirs) for _, theirs in pairs[:3]] == [False, True, False]


def test_one_whose_bytes_are_unread_stays(limit, pairs):
    pairs[0][1].sendall(b"GET")
    for ours, _ in pairs[:3]:
        limit.admit(ours)
    assert [is_shut(theirs) for _, theirs in pairs[:3]] == [False, True, False]


def test_there_is_no_room_until_a_server_has_read_what_has_come(limit, pairs):
    admitted = [limit.admit(ours) for ours, _ in pairs[:2]]
    for _, theirs in pairs[:2]:
        theirs.sendall(b"GET")
    assert not limit.make_room()
    admitted[1].peeked = 3
    assert limit.make_room()
    assert [is_shut(theirs) for _, theirs in pairs[:2]] == [False, True]


def test_there_is_no_room_until_one_has_waited_for_a_moment(limit, pairs, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(admission, "_MIN_SECONDS", 0.5)
    monkeypatch.setattr(admission.time, "monotonic", lambda: now[0])
    for ours, _ in pairs[:2]:
        limit.admit(ours)
    assert not limit.make_room()
    assert len(limit.waiting) == 2
    now[0] += 0.5
    assert limit.make_room()
    assert [is_shut(theirs) for _, theirs in pairs[:2]] == [True, False]


def test_one_that_has_ended_is_left_alone(limit, pairs):
    for ours, _ in pairs:
        limit.admit(ours).end()
    assert not limit.waiting
    assert not any(is_shut(theirs) for _, theirs in pairs)


def test_there_is_no_room_until_a_server_has_closed_what_is_shut_down(limit, pairs):
    admitted = [limit.admit(ours) for ours, _ in pairs[:4]]
    assert [is_shut(theirs) for _, theirs in pairs[:4]] == [True, True, False, False]
    assert not limit.make_room()
    admitted[0].end()
    assert limit.make_room()
    assert is_shut(pairs[2][1])


def test_one_that_ends_while_it_is_evicted_is_forgotten(limit, pairs):
    """Its server, in another thread, has called ``end`` between two steps of the eviction."""
    evicted = limit.admit(pairs[0][0])
    evicted.has_ended = True
    assert limit._evict()
    assert not limit.evicted


def test_it_is_a_part_of_the_limit_of_descriptors(monkeypatch):
    limit = ConnectionLimit("test connections", 8, 1024)
    for descriptors, size in ((256, 32), (4, 8), (1 << 20, 1024), (resource.RLIM_INFINITY, 1024)):
        monkeypatch.setattr(admission.resource, "getrlimit", lambda _, soft=descriptors: (soft, soft))
        assert limit.size == size


def test_the_log_has_a_line_a_minute_with_the_address(limit, caplog):
    with socket.create_server(("127.0.0.1", 0)) as listener, caplog.at_level(logging.WARNING):
        clients = [socket.create_connection(listener.getsockname(), 10) for _ in range(4)]
        accepted = [listener.accept()[0] for _ in range(4)]
        for sock in accepted:
            limit.admit(sock)
        for sock in (*clients, *accepted):
            sock.close()
    (line,) = caplog.messages
    assert "test connections" in line
    assert "127.0.0.1" in line
