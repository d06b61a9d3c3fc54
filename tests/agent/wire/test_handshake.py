"""The mutual challenge, and what does not get past it."""

from __future__ import annotations

import hashlib
import hmac
import random
import struct

import pytest

from rankmesh_agent.wire.errors import AuthenticationError, ProtocolError
from rankmesh_agent.wire.handshake import HELLO_BYTES, PROOF_BYTES, Challenge


def greeted(client_token: str = "secret", server_token: str = "secret") -> tuple[Challenge, Challenge]:
    client, server = Challenge(client_token, client=True), Challenge(server_token, client=False)
    server.receive_hello(client.hello())
    client.receive_hello(server.hello())
    return client, server


def test_sizes_are_fixed():
    client, server = greeted()
    assert (HELLO_BYTES, PROOF_BYTES) == (40, 32)
    assert len(client.hello()) == len(server.hello()) == 40
    assert len(client.proof()) == len(server.proof()) == 32


def test_hello_is_magic_version_and_nonce():
    hello = Challenge("", client=True).hello()
    assert hello[:8] == b"RKMH-HI\x01"
    assert hello[8:] != Challenge("", client=True).hello()[8:], "a nonce is used once"


@pytest.mark.parametrize("token", ["secret", "", "ключ", "x" * 1000])
def test_both_sides_convince_each_other(token):
    client, server = greeted(token, token)
    server.receive_proof(client.proof())
    client.receive_proof(server.proof())


def test_proofs_are_the_hmac_the_description_says():
    client, server = greeted("secret", "secret")
    nonces = client.hello()[8:] + server.hello()[8:]
    assert client.proof() == hmac.new(b"secret", b"client" + nonces, hashlib.sha256).digest()
    assert server.proof() == hmac.new(b"secret", b"server" + nonces, hashlib.sha256).digest()


@pytest.mark.parametrize(("client_token", "server_token"), [("wrong", "secret"), ("", "secret"), ("secret", "")])
def test_another_token_is_refused_by_both(client_token, server_token):
    client, server = greeted(client_token, server_token)
    with pytest.raises(AuthenticationError, match="RANKMESH_TOKEN"):
        server.receive_proof(client.proof())
    with pytest.raises(AuthenticationError, match="RANKMESH_TOKEN"):
        client.receive_proof(server.proof())


def test_a_reflected_proof_is_refused():
    client, server = greeted()
    with pytest.raises(AuthenticationError):
        client.receive_proof(client.proof())
    with pytest.raises(AuthenticationError):
        server.receive_proof(server.proof())


def test_a_reflected_conversation_is_refused():
    client = Challenge("secret", client=True)
    client.receive_hello(client.hello())
    with pytest.raises(AuthenticationError):
        client.receive_proof(client.proof())


def test_a_proof_cannot_be_had_from_another_server():
    victim = Challenge("secret", client=True)
    oracle = Challenge("secret", client=True)  # what an attacker gets another client to say to it
    victim.receive_hello(oracle.hello())
    oracle.receive_hello(victim.hello())
    with pytest.raises(AuthenticationError):
        victim.receive_proof(oracle.proof())


def test_a_recorded_proof_is_worth_nothing_against_a_fresh_nonce():
    client, _ = greeted()
    hello, proof = client.hello(), client.proof()
    server = Challenge("secret", client=False)
    server.receive_hello(hello)
    with pytest.raises(AuthenticationError):
        server.receive_proof(proof)


@pytest.mark.parametrize("client", [True, False])
def test_another_version_is_refused(client):
    hello = struct.pack("!7sB32s", b"RKMH-HI", 2, bytes(32))
    with pytest.raises(ProtocolError, match="protocol version 2, this one 1"):
        Challenge("", client=client).receive_hello(hello)


@pytest.mark.parametrize(
    "garbage", [bytes(40), b"\xff" * 40, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".ljust(40), b"RKMH".ljust(40)]
)
def test_garbage_is_refused(garbage):
    with pytest.raises(ProtocolError, match="does not speak"):
        Challenge("", client=False).receive_hello(garbage)


@pytest.mark.parametrize("length", [0, 31, 32, 33])
def test_no_garbage_is_a_proof(length):
    _, server = greeted()
    with pytest.raises(AuthenticationError):
        server.receive_proof(random.Random(0).randbytes(length))


def test_one_flipped_bit_spoils_a_proof():
    client, server = greeted()
    proof = bytearray(client.proof())
    proof[31] ^= 1
    with pytest.raises(AuthenticationError):
        server.receive_proof(bytes(proof))
