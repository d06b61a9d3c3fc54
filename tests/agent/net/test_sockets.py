"""Listening, and what is reported when it cannot be done."""

from __future__ import annotations

import contextlib
import os
import socket
import time

import pytest

from rankmesh_agent.net import sockets
from rankmesh_agent.net.sockets import Interface, bind, interface_for, probe_idle_peer, silent_seconds, url_of
from rankmesh_agent.wire.errors import AddressInUseError, DistNetworkError


def test_any_free_port():
    with bind("127.0.0.1", 0, purpose="a test listens") as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_ipv6_is_written_in_brackets():
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    try:
        listener = bind("::1", 0, purpose="a test listens")
    except DistNetworkError as error:
        pytest.skip(str(error))
    with listener:
        assert url_of(listener).startswith("http://[::1]:")


def test_in_use():
    with bind("127.0.0.1", 0, purpose="a test listens") as first:
        port = first.getsockname()[1]
        with pytest.raises(AddressInUseError) as caught:
            bind("127.0.0.1", port, purpose="a test listens")
    assert caught.value.address == f"127.0.0.1:{port}"
    assert f"(pid {os.getpid()})" in str(caught.value)


def test_an_address_of_another_machine():
    with pytest.raises(DistNetworkError, match=r"cannot use 192\.0\.2\.1:0"):
        bind("192.0.2.1", 0, purpose="a test listens")


def test_a_name_that_nobody_knows(monkeypatch):
    def fail(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(DistNetworkError, match="cannot resolve 'nobody': Name or service not known"):
        bind("nobody", 0, purpose="a test listens")


def test_a_peer_that_answers_is_not_silent_even_if_it_reads_nothing():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as mine:
        probe_idle_peer(mine)
        theirs, _ = listener.accept()
        with theirs:
            mine.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    mine.send(bytes(1 << 20))
            deadline = time.monotonic() + 1
            while time.monotonic() < deadline:  # meanwhile the kernel asks for room, more than once
                assert silent_seconds(mine) < 1
                time.sleep(0.05)


INTERFACES = [Interface("lo", "127.0.0.1"), Interface("docker0", "172.17.0.1")]
INTERFACES += [Interface("eth0", "10.0.0.1"), Interface("eth1", "10.0.1.1"), Interface("ib0", "10.0.2.1")]


@pytest.mark.parametrize(
    ("pattern", "near", "expected"),
    [
        ("eth", "", "eth0"),
        ("eth", "10.0.1.1", "eth1"),
        ("eth", "10.0.2.1", "eth0"),
        ("=eth1", "", "eth1"),
        ("=eth1,eth0", "", "eth1"),
        ("ens,ib", "", "ib0"),
        ("lo", "", "lo"),
        ("docker", "", "docker0"),
        ("^eth0", "", "eth1"),
        ("^eth", "10.0.0.1", "ib0"),
        ("^docker,lo", "10.0.2.1", "ib0"),
        ("^=eth", "", "eth0"),
        ("^=eth0", "", "eth1"),
        ("^eth,ib", "", "lo"),
        ("=eth", "", None),
        ("nosuch", "", None),
        ("^eth,ib,lo,docker", "", None),
        (",", "", None),
    ],
)
def test_interfaces_are_named_in_the_syntax_of_nccl(monkeypatch, pattern, near, expected):
    monkeypatch.setattr(sockets, "interfaces", lambda: INTERFACES)
    if expected is None:
        with pytest.raises(DistNetworkError, match=r"NCCL's syntax, allows none .*: lo \(127.0.0.1\), docker0"):
            interface_for(pattern, near)
    else:
        assert interface_for(pattern, near).name == expected


def test_the_interfaces_of_this_machine():
    assert Interface("lo", "127.0.0.1") in sockets.interfaces()
