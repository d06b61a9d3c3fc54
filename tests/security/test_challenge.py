"""The challenge of the binary protocols: what a proof is worth to a process that does not know the credential."""

from __future__ import annotations

from typing import Any

import pytest

from rankmesh_agent.wire.credentials import (
    ROLES,
    Credentials,
    Role,
    check_form,
    derive,
    for_job,
    for_lease,
    hkdf,
    job_of,
    lease_of,
)
from rankmesh_agent.wire.errors import AuthenticationError, ForbiddenJobError
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
@pytest.mark.parametrize("role", ROLES)
def test_a_credential_opens_only_protocols_of_its_role(protocol, role):
    client, server = pair({"token": derive("secret", role), "protocol": protocol}, {"protocol": protocol})
    if role < protocol.role:
        with pytest.raises(AuthenticationError):
            meet(client, server)
    else:
        meet(client, server)
        assert server.grant.role is role
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


JOB = "train"


@pytest.mark.parametrize("protocol", [Protocol.MESH, Protocol.STORE, Protocol.SNAPSHOT])
def test_a_jobs_credential_opens_only_servers_of_its_job(protocol):
    """Of whatever role; nor does a lease's credential open one."""
    own = for_job("secret", JOB)
    server = {"token": Credentials("secret", job=JOB), "protocol": protocol}
    meet(*pair({"token": own, "protocol": protocol}, server))
    for credential in (for_job("secret", "another job"), for_job("guess", JOB), for_lease(own, JOB, "ab" * 16)):
        with pytest.raises(AuthenticationError):
            meet(*pair({"token": credential, "protocol": protocol}, server))
    of_another = Credentials(for_job("secret", "another job"))
    for accepted in (Credentials("secret"), of_another, Credentials("other", job=JOB)):
        with pytest.raises(AuthenticationError):
            meet(*pair({"token": own, "protocol": protocol}, {"token": accepted, "protocol": protocol}))


@pytest.mark.parametrize("job", ["train", "default", "a job: 100 % 'quoted'", "größer/…", "a:b:c", "x" * 255])
def test_the_text_of_a_credential_names_its_job(job):
    own = for_job("secret", job)
    found = {role: derive(own, role) for role in ROLES}
    assert len(set(found.values())) == 3
    lease = for_lease(own, job, "ab" * 16)
    assert {job_of(each) for each in (*found.values(), lease)} == {job}
    assert (lease_of(lease), lease_of(own)) == ("ab" * 16, "")
    assert all(each.isascii() and not set(each) & set(" \n\"'") for each in (*found.values(), lease))
    assert for_job(own, job) == own
    with pytest.raises(ForbiddenJobError, match="'another'"):
        for_job(own, "another")
    for broken in (own[:-1], own + "0", own.replace(":run:", ":all:")):
        with pytest.raises(ValueError, match="not complete"):
            check_form(broken)
        assert job_of(broken) is None
    assert check_form("another: token") == "another: token"
