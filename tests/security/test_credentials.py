"""Credentials: what each opens, where HTTP accepts one, and how many guesses an address has."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rankmesh_agent.http.middleware import SecurityMiddleware
from rankmesh_agent.wire.credentials import (
    ROLES,
    Credentials,
    Grant,
    Role,
    check_form,
    derive,
    for_job,
    for_lease,
    hkdf,
    job_of,
)
from rankmesh_agent.wire.errors import ForbiddenJobError

TOKEN = "the secret of this job"
OWN = for_job(TOKEN, "train")
LEASE = "ab" * 16


async def respond(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"here"})


def ask(guard: SecurityMiddleware, authorization: str, **scope: Any) -> int:
    """Return the status of the response to a request."""
    sent: list[Any] = []
    asked = {"type": "http", "method": "POST", "path": "/v1/x", "query_string": b"", "client": ("10.0.0.9", 1)} | scope
    asked["headers"] = [(b"host", b"10.0.0.1:80"), (b"authorization", authorization.encode())]

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(guard(asked, receive, send))
    return int(sent[0]["status"])


@pytest.mark.parametrize(
    ("scope", "private", "status"),
    [
        ({"client": ("10.0.0.9", 1), "server": ("10.0.0.1", 80)}, False, 403),
        ({"client": ("fe80::1", 1)}, False, 403),
        ({"client": ("10.0.0.9", 1)}, True, 200),
        ({"client": ("10.0.0.9", 1), "scheme": "https"}, False, 200),
        ({"client": ("127.0.0.1", 1)}, False, 200),
        ({"client": ("::ffff:127.0.0.1", 1)}, False, 200),
        ({"client": ("10.0.0.1", 1), "server": ("10.0.0.1", 80)}, False, 200),
        ({"client": None}, False, 200),
    ],
    ids=str,
)
def test_a_bearer_token_is_accepted_only_where_no_network_sees_it(scope, private, status):
    guard = SecurityMiddleware(respond, Credentials(TOKEN, private_network=private))
    assert ask(guard, f"Bearer {TOKEN}", **scope) == status
    assert ask(guard, "Bearer guess", **scope) == 401


@pytest.mark.parametrize(
    ("credential", "grant"),
    [
        (TOKEN, Grant(Role.RUN)),
        (derive(TOKEN, Role.USE), Grant(Role.USE)),
        (derive(TOKEN, Role.READ), Grant(Role.READ)),
        (OWN, Grant(Role.RUN, "train")),
        (derive(OWN, Role.READ), Grant(Role.READ, "train")),
        (for_lease(OWN, "train", LEASE), Grant(Role.LEASE, "train", LEASE)),
        ("", None),
        ("guess", None),
        (for_job("guess", "train"), None),
        (OWN.replace(":train:", ":other:"), None),
        (for_lease(for_job("guess", "train"), "train", LEASE), None),
    ],
)
def test_what_a_credential_opens(credential, grant):
    assert Credentials(TOKEN).grant_of(credential) == grant
    assert Credentials("").grant_of(credential) == Grant(Role.RUN), "without a token, every client has every role"


@pytest.mark.parametrize("job", ["train", "default", "a job: 100 % 'quoted'", "größer/…", "a:b:c", "x" * 255])
def test_the_text_of_a_credential_names_its_job(job):
    own = for_job("secret", job)
    found = {role: derive(own, role) for role in ROLES}
    assert len(set(found.values())) == 3
    lease = for_lease(own, job, "ab" * 16)
    assert {job_of(each) for each in (*found.values(), lease)} == {job}
    assert all(each.isascii() and not set(each) & set(" \n\"'") for each in (*found.values(), lease))
    assert for_job(own, job) == own
    with pytest.raises(ForbiddenJobError, match="'another'"):
        for_job(own, "another")
    for broken in (own[:-1], own + "0", own.replace(":run:", ":all:")):
        with pytest.raises(ValueError, match="not complete"):
            check_form(broken)
        assert job_of(broken) is None
    assert check_form("another: token") == "another: token"


def test_keys_are_those_of_rfc_5869():
    """Test case 1 of its appendix A, the first 32 bytes."""
    info = bytes(range(0xF0, 0xFA))
    key = hkdf(b"\x0b" * 22, "", salt=bytes(range(13)), context=info)
    assert key.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"
