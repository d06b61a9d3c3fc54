"""HELLO and WELCOME: golden bytes, who is accepted, and what is read of a client that is not."""

from __future__ import annotations

from typing import Any

import pytest

from rankmesh_agent.wire.credentials import ROLES, Credentials, Role, derive, for_job, for_lease
from rankmesh_agent.wire.errors import AuthenticationError, ProtocolError
from rankmesh_agent.wire.hello import (
    HELLO_BYTES,
    MAX_CREDENTIAL_BYTES,
    Client,
    ClientRefusedError,
    NeedsTlsError,
    Service,
    Verdict,
    accepting_script,
    client_script,
    hello,
    welcome,
)

REFUSAL = AuthenticationError("refused")
JOB = "train"


def serve(
    data: bytes, token: str | Credentials, service: Service = Service.MESH, *, extra: int = 0, exposed: bool = False
) -> tuple[Client | None, bytes]:
    """Run the server's side on a client's bytes; return the client, None if it is refused, and the answer."""
    script = accepting_script(lambda _: token, service, extra, exposed)
    answer, (sent, wanted) = b"", next(script)
    while True:
        answer += sent
        chunk, data = data[:wanted], data[wanted:]
        assert len(chunk) == wanted, "the client has sent too little"
        try:
            sent, wanted = script.send(chunk)
        except StopIteration as end:
            assert not data, "the client has sent more than the server reads"
            return end.value, answer
        except ClientRefusedError:
            return None, answer


def understand(answer: bytes, reply_bytes: int = 0) -> Any:
    """Run the client's side on a server's answer; return what follows the WELCOME."""
    script = client_script(b"HELLO", REFUSAL, reply_bytes)
    sent, wanted = next(script)
    assert sent == b"HELLO"
    try:
        script.send(answer[:wanted])
        script.send(answer[wanted:])
    except StopIteration as end:
        return end.value
    return None


def test_golden():
    name = bytes(range(64))
    data = hello(Service.STORE, "secret", b"attachment", name)
    assert data == b"RKMH-HI\x03\x02" + name + b"\0\6secretattachment"
    assert len(hello(Service.MESH, "")) == HELLO_BYTES == 75
    assert serve(data, "secret", Service.STORE, extra=10)[0] == (name, b"attachment", (Role.RUN, None, ""))
    assert serve(data, "secret", Service.STORE, extra=10)[1] == welcome() == b"RKMH-HI\x03\0"
    assert hello(Service.MESH, "")[9:] != hello(Service.MESH, "")[9:], "a name is used once"


@pytest.mark.parametrize("token", ["secret", "", "ключ", "x" * MAX_CREDENTIAL_BYTES])
def test_the_same_token_is_accepted(token):
    client, answer = serve(hello(Service.MESH, token), token)
    assert client is not None
    assert understand(answer + b"more", 4) == b"more"
    assert understand(answer) == b""


@pytest.mark.parametrize(("ours", "theirs"), [("wrong", "secret"), ("", "secret"), ("secre", "secret")])
def test_another_token_is_refused(ours, theirs):
    client, answer = serve(hello(Service.MESH, ours), theirs)
    assert client is None
    with pytest.raises(AuthenticationError) as caught:
        understand(answer)
    assert caught.value is REFUSAL


def test_a_server_without_a_token_accepts_every_client():
    """It looks at their user."""
    assert serve(hello(Service.MESH, "any"), "")[0] is not None


def test_a_connection_that_needs_tls_is_refused_before_its_credential_is_read():
    client, answer = serve(hello(Service.MESH, ""), "secret", exposed=True)
    assert client is None
    assert answer == welcome(Verdict.NEEDS_TLS)
    with pytest.raises(NeedsTlsError):
        understand(answer)


@pytest.mark.parametrize("service", Service)
@pytest.mark.parametrize("role", ROLES)
def test_a_credential_opens_only_services_of_its_role(service, role):
    client, _ = serve(hello(service, derive("secret", role)), "secret", service)
    assert (client is not None) == (role >= service.role)
    assert client is None or client.grant.role is role


def test_a_credential_given_separately_replaces_the_derived_one():
    accepted = Credentials("secret", use="users'")
    assert serve(hello(Service.STORE, "users'"), accepted, Service.STORE)[0] is not None
    assert serve(hello(Service.STORE, derive("secret", Role.USE)), accepted, Service.STORE)[0] is None


@pytest.mark.parametrize("service", [Service.MESH, Service.STORE, Service.SNAPSHOT])
def test_a_jobs_credential_opens_only_servers_of_its_job(service):
    """Of whatever role; nor does a lease's credential open one."""
    own = for_job("secret", JOB)
    server = Credentials("secret", job=JOB)
    assert serve(hello(service, own), server, service)[0] is not None
    for credential in (for_job("secret", "another job"), for_job("guess", JOB), for_lease(own, JOB, "ab" * 16)):
        assert serve(hello(service, credential), server, service)[0] is None
    of_another = Credentials(for_job("secret", "another job"))
    for accepted in (Credentials("secret"), of_another, Credentials("other", job=JOB)):
        assert serve(hello(service, own), accepted, service)[0] is None


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"GET / HTTP/1.1\r\n".ljust(HELLO_BYTES, b"x"), "does not speak RankMesh's protocol"),
        (hello(Service.STORE, ""), "another service"),
        (hello(Service.MESH, "x" * (MAX_CREDENTIAL_BYTES + 1))[:HELLO_BYTES], "another service"),
        (b"RKMH-HI\x02".ljust(HELLO_BYTES, b"x"), "speaks protocol version 2, this one 3"),
    ],
    ids=["HTTP", "another service", "a long credential", "another version"],
)
def test_other_bytes_are_no_hello(data, error):
    with pytest.raises(ProtocolError, match=error):
        serve(data, "secret")


@pytest.mark.parametrize(
    ("answer", "error"), [(b"HTTP/1.1 ", "does not speak"), (b"RKMH-HI\x02\0", "protocol version 2, this one 3")]
)
def test_other_bytes_are_no_welcome(answer, error):
    with pytest.raises(ProtocolError, match=error):
        understand(answer)
