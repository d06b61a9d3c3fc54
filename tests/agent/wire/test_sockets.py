"""Listening, and what is said when it cannot be done."""

from __future__ import annotations

import os
import socket

import pytest

from rankmesh_agent.wire.errors import AddressInUseError, DistNetworkError
from rankmesh_agent.wire.sockets import bind, url_of


def test_any_free_port():
    with bind("127.0.0.1", 0, what="a test listens") as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_ipv6_is_written_in_brackets():
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    try:
        listener = bind("::1", 0, what="a test listens")
    except DistNetworkError as error:
        pytest.skip(str(error))
    with listener:
        assert url_of(listener).startswith("http://[::1]:")


def test_in_use():
    with bind("127.0.0.1", 0, what="a test listens") as first:
        port = first.getsockname()[1]
        with pytest.raises(AddressInUseError) as caught:
            bind("127.0.0.1", port, what="a test listens")
    assert caught.value.address == f"127.0.0.1:{port}"
    assert f"(pid {os.getpid()})" in str(caught.value)


def test_an_address_of_another_machine():
    with pytest.raises(DistNetworkError, match=r"cannot use 192\.0\.2\.1:0"):
        bind("192.0.2.1", 0, what="a test listens")


def test_a_name_that_nobody_knows(monkeypatch):
    def fail(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(DistNetworkError, match="cannot resolve 'nobody': Name or service not known"):
        bind("nobody", 0, what="a test listens")
