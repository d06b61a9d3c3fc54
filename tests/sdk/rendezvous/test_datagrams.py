"""What is reported in a multicast group, and who is believed."""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import struct
from dataclasses import asdict, replace

import pytest

from rankmesh._rendezvous.multicast import (
    MAX_BYTES,
    Datagram,
    MulticastSocket,
    decode,
    encode,
    interface_of,
    job_digest,
)
from rankmesh_agent.wire.errors import DistNetworkError

GROUP = "239.255.41.8"
ASK = Datagram("ask", job_digest("job"), "1abc")
HERE = Datagram("here", job_digest("job"), "0def", "1abc", "http://127.0.0.1:4000", "0123456789abcdef")


def sealed(body: bytes, token: str = "secret", version: int = 1) -> bytes:
    """A datagram by the book, written without the code under test."""
    seal = hmac.new(token.encode(), b"RankMesh" + bytes([version]) + body, hashlib.sha256).digest()
    return b"RankMesh" + bytes([version]) + seal + body


@pytest.mark.parametrize("message", [ASK, HERE])
@pytest.mark.parametrize("token", ["", "secret"])
def test_what_is_encoded_can_be_decoded(message, token):
    datagram = encode(message, token)
    assert decode(datagram, token) == message
    assert datagram == sealed(json.dumps(asdict(message)).encode(), token)


def test_the_longest_fits():
    long = Datagram("here", job_digest("j" * 5000), "0" * 33, "1" * 33, f"http://{'h' * 255}:65535", "0" * 16)
    assert len(encode(long, "secret")) <= MAX_BYTES


def test_the_version_and_every_bit_count():
    datagram = encode(HERE, "secret")
    for bit in range(8 * len(datagram)):
        changed = bytearray(datagram)
        changed[bit // 8] ^= 1 << bit % 8
        assert decode(bytes(changed), "secret") is None, bit
    assert decode(datagram, "other") is None
    assert decode(datagram, "") is None
    assert decode(encode(HERE, ""), "secret") is None
    assert decode(sealed(json.dumps(asdict(HERE)).encode(), version=2), "secret") is None


HOSTILE = {
    "nothing": b"",
    "no body": sealed(b""),
    "too long": sealed(json.dumps(asdict(ASK) | {"to": "x" * MAX_BYTES}).encode()),
    "no json": sealed(b"{"),
    "no text": sealed(b"\xff\xfe"),
    "deep": sealed(b"[" * 1000),
    "a list": sealed(b"[]"),
    "a number": sealed(b"1"),
    "a field missing": sealed(b'{"kind": "ask", "job": "j"}'),
    "a field too many": sealed(json.dumps(asdict(ASK) | {"more": ""}).encode()),
    "a field of another type": sealed(json.dumps(asdict(ASK) | {"url": 1}).encode()),
    "a list for a kind": sealed(json.dumps(asdict(ASK) | {"kind": []}).encode()),
    "another kind": sealed(json.dumps(asdict(ASK) | {"kind": "shout"}).encode()),
    "a long field": sealed(json.dumps(asdict(ASK) | {"url": "x" * 600}).encode()),
}


@pytest.mark.parametrize("datagram", HOSTILE.values(), ids=HOSTILE)
def test_what_is_not_understood_is_ignored(datagram):
    assert decode(datagram, "secret") is None


@pytest.mark.parametrize(
    ("url", "believed"),
    [
        ("http://127.0.0.1:4000", True),
        ("http://[::1]:4000", True),
        ("http://localhost:4000", True),
        ("http://10.0.0.1:4000", False),
        ("http://127.0.0.1.evil.example:4000", False),
        ("http://127.0.0.1@evil.example:4000", False),
        ("http://evil.example/127.0.0.1:4000", False),
        ("ftp://127.0.0.1:4000", False),
        ("nonsense", False),
    ],
)
def test_without_a_token_only_this_machine_is_believed(url, believed):
    message = replace(HERE, url=url)
    assert (decode(encode(message, ""), "") == message) is believed
    assert decode(encode(message, "secret"), "secret") == message


class TestChannel:
    @pytest.fixture
    def pair(self):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        channels = [MulticastSocket(GROUP, port, "127.0.0.1", "secret") for _ in range(2)]
        yield (*channels, port)
        for channel in channels:
            channel.close()

    def test_everyone_hears_everyone(self, pair):
        one, two, _ = pair
        one.send(ASK)
        two.send(HERE)
        for channel in (one, two):
            heard = channel.receive(20)
            assert {next(heard), next(heard)} == {ASK, HERE}

    def test_silence_ends_when_the_time_is_over(self, pair):
        assert list(pair[0].receive(0.05)) == []

    def test_hostile_datagrams_do_not_disturb(self, pair):
        one, two, port = pair
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            stranger.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
            for datagram in (*HOSTILE.values(), bytes(60_000), encode(ASK, "wrong")):
                stranger.sendto(datagram, (GROUP, port))
        two.send(ASK)
        assert next(one.receive(20)) == ASK

    def test_an_interface_may_be_named(self):
        channel = MulticastSocket(GROUP, 0, "10.9.8.7", "secret", interface="lo")
        channel.close()
        with pytest.raises(DistNetworkError, match=r"no-such-one.*GLOO_SOCKET_IFNAME"):
            MulticastSocket(GROUP, 0, "127.0.0.1", "secret", interface="no-such-one")

    def test_an_address_that_is_not_this_machines(self):
        with pytest.raises(
            DistNetworkError, match=r"cannot join multicast group 239.* from 192\.0\.2\.77.*RANKMESH_BIND"
        ):
            MulticastSocket(GROUP, 0, "192.0.2.77", "secret")


def test_the_interface_of_an_address():
    lo = socket.if_nametoindex("lo")
    assert interface_of("127.0.0.1") == interface_of("::1") == interface_of("localhost") == lo
    assert interface_of("2001:db8::1") == 0, "documentation's, so nobody's"
    assert interface_of("a name") == 0
    with open("/proc/net/if_inet6") as lines:
        for line in lines:
            packed, index, *_ = line.split()
            address = socket.inet_ntop(socket.AF_INET6, struct.pack("16s", bytes.fromhex(packed)))
            assert interface_of(address) == int(index, 16)
