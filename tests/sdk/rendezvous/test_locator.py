"""The address that a rank listens on."""

from __future__ import annotations

import socket

import pytest

from rankmesh._rendezvous import locator
from rankmesh._rendezvous.locator import configured_address, listen_address
from rankmesh._rendezvous.tcp import TcpLocator
from rankmesh_agent.config import addresses
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.net import sockets
from rankmesh_agent.net.sockets import Interface
from rankmesh_agent.wire.errors import DistNetworkError

ETH = Interface("eth0", "10.0.0.1")
TOKEN = "the secret of all"
NCCL = [None, "eth", "eth0", "=eth0", "=eth0,eth1", "eth,ens", "^docker", "^docker,lo", "^=docker0", "ib", "lo"]


@pytest.fixture(autouse=True)
def one_interface(monkeypatch):
    monkeypatch.setattr(sockets, "interfaces", lambda: [Interface("lo", "127.0.0.1"), ETH])
    monkeypatch.setattr(locator, "address_towards", lambda host, port: "10.0.7.7")


@pytest.mark.parametrize("interface", NCCL)
def test_ranks_that_meet_at_loopback_need_no_interface(interface):
    settings = Settings(interface=interface)
    for host, expected in [("127.0.0.1", "127.0.0.1"), ("LOCALHOST", "127.0.0.1"), ("::1", "::1")]:
        assert listen_address(settings, host, 1) == expected


@pytest.mark.parametrize(
    ("interface", "expected"),
    [(None, "10.0.7.7"), ("eth", "10.0.0.1"), ("^docker", "10.0.0.1"), ("lo", "127.0.0.1"), ("ib", None)],
)
def test_ranks_that_meet_elsewhere_listen_on_the_interface(interface, expected):
    settings = Settings(interface=interface)
    if expected is None:
        with pytest.raises(DistNetworkError, match=r"'ib' in NCCL's syntax, allows none of the network interfaces"):
            listen_address(settings, "node7", 1)
    else:
        assert listen_address(settings, "node7", 1) == expected
    assert listen_address(Settings(interface=interface, bind="10.0.8.8"), "node7", 1) == "10.0.8.8"


@pytest.mark.parametrize(
    ("interface", "token", "expected", "warns"),
    [
        (None, "", "127.0.0.1", ""),
        ("eth", TOKEN, "10.0.0.1", ""),
        ("eth", "", "127.0.0.1", "without a token"),
        ("ib", TOKEN, "127.0.0.1", "allows none of the network interfaces"),
        ("^docker", TOKEN, "127.0.0.1", ""),
    ],
)
def test_ranks_that_know_no_host_listen_on_loopback_unless_an_interface_serves(
    interface, token, expected, warns, caplog
):
    assert configured_address(Settings(interface=interface, token=token)) == expected
    assert [warns in record.getMessage() for record in caplog.records] == [True] * bool(warns)


@pytest.mark.parametrize("host", ["LOCALHOST", "debian"])
def test_a_name_of_loopback_needs_no_token(opened, settings, answers, monkeypatch, host):
    """As Debian's /etc/hosts has the machine's own name."""
    original = socket.getaddrinfo

    def lookup(name, *arguments, **options):
        return original("127.0.1.1" if name == "debian" else name, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    assert addresses.resolves_to_loopback(host)
    first = opened(TcpLocator, host, 0, 0, settings)
    assert answers(first.find())
    second = opened(TcpLocator, host, int(first.find().rpartition(":")[2]), 1, settings)
    assert first.bind_host == second.bind_host == "127.0.0.1"
