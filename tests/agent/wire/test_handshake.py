"""The mutual challenge, and what does not get past it."""

from __future__ import annotations

import hashlib
import hmac
import random
import struct
from typing import Any

import pytest

from rankmesh_agent.wire.errors import AuthenticationError, ProtocolError
from rankmesh_agent.wire.handshake import HELLO_BYTES, PROOF_BYTES, Challenge, Protocol


def challenge(token: str, *, client: bool = True, **options: Any) -> Challenge:
    return Challenge(token, options.pop("protocol", Protocol.MESH), client=client, **options)


def greeted(client_token: str = "secret", server_token: str = "secret") -> tuple[Challenge, Challenge]:
    client, server = challenge(client_token), challenge(server_token, client=False)
    server.receive_hello(client.hello())
    client.receive_hello(server.hello())
    return client, server


@pytest.mark.parametrize("token", ["secret", "", "ключ", "x" * 1000])
def test_golden(token):
    client, server = greeted(token, token)
    hellos = client.hello(), server.hello()
    assert all(len(hello) == HELLO_BYTES == 40 and hello[:8] == b"RKMH-HI\x03" for hello in hellos)
    nonces = hellos[0][8:] + hellos[1][8:]
    assert nonces == client.name == server.name
    extracted = hmac.new(bytes(32), token.encode(), hashlib.sha256).digest()
    key = hmac.new(extracted, b"rankmesh challenge\x01", hashlib.sha256).digest()
    context = b"\0\0\0\x04mesh" + bytes(8) + b"\0\0\0\x40" + nonces
    assert client.proof() == hmac.new(key, b"\0\0\0\x06client" + context, hashlib.sha256).digest()
    assert server.proof() == hmac.new(key, b"\0\0\0\x06server" + context, hashlib.sha256).digest()
    assert len(client.proof()) == PROOF_BYTES
    server.receive_proof(client.proof())
    client.receive_proof(server.proof())
    assert greeted()[0].hello()[8:] != hellos[0][8:], "a nonce is used once"


@pytest.mark.parametrize("length", [0, 31, 32, 33])
def test_other_bytes_are_no_proof(length):
    client, server = greeted()
    flipped = bytearray(client.proof())
    flipped[31] ^= 1
    for data in (random.Random(0).randbytes(length), bytes(flipped)):
        with pytest.raises(AuthenticationError):
            server.receive_proof(data)


@pytest.mark.parametrize(("client_token", "server_token"), [("wrong", "secret"), ("", "secret"), ("secret", "")])
def test_another_token_is_refused_by_both(client_token, server_token):
    client, server = greeted(client_token, server_token)
    with pytest.raises(AuthenticationError, match="RANKMESH_TOKEN"):
        server.receive_proof(client.proof())
    with pytest.raises(AuthenticationError, match="RANKMESH_TOKEN"):
        client.receive_proof(server.proof())


def test_reflected_messages_are_refused():
    client, server = greeted()
    for side in (client, server):
        with pytest.raises(AuthenticationError):
            side.receive_proof(side.proof())
    client.receive_hello(client.hello())
    with pytest.raises(AuthenticationError):
        client.receive_proof(client.proof())


def test_a_proof_cannot_be_had_from_another_server():
    victim = challenge("secret")
    oracle = challenge("secret")  # what an attacker gets another client to say to it
    victim.receive_hello(oracle.hello())
    oracle.receive_hello(victim.hello())
    with pytest.raises(AuthenticationError):
        victim.receive_proof(oracle.proof())


def test_a_recorded_proof_is_worth_nothing_against_a_fresh_nonce():
    client, _ = greeted()
    hello, proof = client.hello(), client.proof()
    server = challenge("secret", client=False)
    server.receive_hello(hello)
    with pytest.raises(AuthenticationError):
        server.receive_proof(proof)


@pytest.mark.parametrize("client", [True, False])
def test_another_version_is_refused(client):
    hello = struct.pack("!7sB32s", b"RKMH-HI", 1, bytes(32))
    with pytest.raises(ProtocolError, match="protocol version 1, this one 3"):
        challenge("", client=client).receive_hello(hello)


@pytest.mark.parametrize(
    "garbage", [bytes(40), b"\xff" * 40, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".ljust(40), b"RKMH".ljust(40)]
)
def test_garbage_is_refused(garbage):
    with pytest.raises(ProtocolError, match="does not speak"):
        challenge("", client=False).receive_hello(garbage)
