"""The challenge of the binary protocols: what a proof is worth to a process that does not know the credential."""

from __future__ import annotations

from typing import Any

import pytest

from rankmesh_agent.wire.credentials import Credentials, Role, derive, hkdf
from rankmesh_agent.wire.errors import AuthenticationError
from rankmesh_agent.wire.handshake import Challenge, Protocol


def meet(client: Challenge, server: Challenge) -> None:
    """Run the challenge through a relay that forwards every byte."""
    server.receive_hello(client.hello())
    client.receive_hello(server.hello())
    server.receive_proof(client.proof())
    client.receive_proof(server.proof())


def pair(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[Challenge, Challenge]:
    defaults: dict[str, Any] = {"token": "secret", "protocol": Protocol.ATTACH}
    return Challenge(client=True, **defaults | ours), Challenge(client=False, **defaults | theirs)


@pytest.mark.parametrize(
    "other", [{"protocol": Protocol.MESH}, {"binding": b"another TLS connection"}], ids=["protocol", "TLS connection"]
)
def test_a_relayed_proof_is_refused(other):
    """By a server of another protocol, and at the end of another TLS connection."""
    meet(*pair({}, {}))
    with pytest.raises(AuthenticationError):
        meet(*pair({}, other))
    with pytest.raises(AuthenticationError):
        meet(*pair(other, {}))


def test_fields_cannot_be_shifted():
    client, server = pair({"binding": b"ab"}, {"binding": b"a"})
    client.attachment, server.attachment = b"c", b"bc"
    with pytest.raises(AuthenticationError):
        meet(client, server)


def test_what_follows_the_proof_cannot_be_replaced():
    """It names the rank that connects, and the process to which it does."""
    client, server = pair({}, {})
    client.attachment = b"from rank 1 to rank 2"
    server.attachment = b"from rank 1 to rank 3"
    with pytest.raises(AuthenticationError):
        meet(client, server)


def test_a_session_key_is_known_to_both_ends_and_to_no_relay():
    client, server = pair({}, {})
    meet(client, server)
    relay = Challenge("guess", Protocol.ATTACH, client=True)
    relay.receive_hello(server.hello())
    relay._both = client.name
    assert client.session_key("frames") == server.session_key("frames")
    assert len({client.session_key("frames"), client.session_key("other"), relay.session_key("frames")}) == 3
    again = pair({}, {})
    meet(*again)
    assert again[0].session_key("frames") != client.session_key("frames")


@pytest.mark.parametrize("protocol", Protocol)
@pytest.mark.parametrize("role", Role)
def test_a_credential_opens_only_protocols_of_its_role(protocol, role):
    client, server = pair({"token": derive("secret", role), "protocol": protocol}, {"protocol": protocol})
    if role < protocol.role:
        with pytest.raises(AuthenticationError):
            meet(client, server)
    else:
        meet(client, server)
        assert server.role is role
        assert client.session_key("frames") == server.session_key("frames")


def test_a_credential_given_separately_replaces_the_derived_one():
    accepted = Credentials("secret", use="users'")
    meet(*pair({"token": "users'", "protocol": Protocol.STORE}, {"token": accepted, "protocol": Protocol.STORE}))
    derived = {"token": derive("secret", Role.USE), "protocol": Protocol.STORE}
    with pytest.raises(AuthenticationError):
        meet(*pair(derived, {"token": accepted, "protocol": Protocol.STORE}))


def test_keys_are_those_of_rfc_5869():
    """Test case 1 of its appendix A, the first 32 bytes."""
    info = bytes(range(0xF0, 0xFA))
    key = hkdf(b"\x0b" * 22, "", salt=bytes(range(13)), context=info)
    assert key.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"
