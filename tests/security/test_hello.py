"""HELLO and WELCOME: golden bytes, who is accepted, and what is read of a client that is not."""

from __future__ import annotations

from typing import Any

import pytest

from rankmesh_agent.net.tls import RECORD
from rankmesh_agent.wire.credentials import ROLES, Credentials, Role, derive, for_job, for_lease
from rankmesh_agent.wire.errors import AuthenticationError, DistNetworkError, ProtocolError
from rankmesh_agent.wire.hello import (
    HELLO_BYTES,
    MAX_CREDENTIAL_BYTES,
    Client,
    ClientRefusedError,
    NeedsTlsError,
    Service,
    Verdict,
    check_preface,
    client_script,
    hello,
    is_preface,
    preface,
    server_script,
    service_of,
    welcome,
    welcoming,
)

REFUSAL = AuthenticationError("refused")
JOB = "train"


def serve(
    data: bytes,
    token: str | Credentials,
    service: Service = Service.MESH,
    *,
    extra: int = 0,
    verdict: Verdict = Verdict.WELCOME,
) -> tuple[Client | None, bytes]:
    """Run the server's side on a client's bytes; return the client, None if it is refused, and the answer."""
    script = server_script(lambda _: token, service, extra, lambda: verdict, welcoming())
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
        except ProtocolError:
            raise
        except (ClientRefusedError, DistNetworkError):
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
    assert preface(Service.STORE) == b"RKMH-HI\x03\x02\r\n\r\n"
    data = hello("secret", b"attachment", name)
    assert data == b"\0\6" + name + b"secretattachment"
    assert len(hello("")) == HELLO_BYTES == 66
    assert serve(data, "secret", Service.STORE, extra=10)[0] == (name, b"attachment", (Role.RUN, None, ""))
    assert serve(data, "secret", Service.STORE, extra=10)[1] == welcome() == b"RKMH-HI\x03\0"
    assert hello("") != hello(""), "a name is used once"


@pytest.mark.parametrize("token", ["secret", "", "ключ", "x" * MAX_CREDENTIAL_BYTES])
def test_the_same_token_is_accepted(token):
    client, answer = serve(hello(token), token)
    assert client is not None
    assert understand(answer + b"more", 4) == b"more"
    assert understand(answer) == b""


@pytest.mark.parametrize(("ours", "theirs"), [("wrong", "secret"), ("", "secret"), ("secre", "secret")])
def test_another_token_is_refused(ours, theirs):
    client, answer = serve(hello(ours), theirs)
    assert client is None
    with pytest.raises(AuthenticationError) as caught:
        understand(answer)
    assert caught.value is REFUSAL


def test_a_server_without_a_token_accepts_every_client():
    """It looks at their user."""
    assert serve(hello("any"), "")[0] is not None


@pytest.mark.parametrize(
    ("verdict", "error"), [(Verdict.NEEDS_TLS, NeedsTlsError), (Verdict.OTHER_USER, AuthenticationError)]
)
def test_a_connection_that_may_have_no_client_is_refused_whatever_its_credential(verdict, error):
    client, answer = serve(hello("secret"), "secret", verdict=verdict)
    assert client is None
    assert answer == welcome(verdict)
    with pytest.raises(error):
        understand(answer)


@pytest.mark.parametrize("service", Service)
@pytest.mark.parametrize("role", ROLES)
def test_a_credential_opens_only_services_of_its_role(service, role):
    client, _ = serve(hello(derive("secret", role)), "secret", service)
    assert (client is not None) == (role >= service.role)
    assert client is None or client.grant.role is role


def test_a_credential_given_separately_replaces_the_derived_one():
    accepted = Credentials("secret", use="users'")
    assert serve(hello("users'"), accepted, Service.STORE)[0] is not None
    assert serve(hello(derive("secret", Role.USE)), accepted, Service.STORE)[0] is None


@pytest.mark.parametrize("service", [Service.MESH, Service.STORE, Service.SNAPSHOT])
def test_a_jobs_credential_opens_only_servers_of_its_job(service):
    """Of whatever role; nor does a lease's credential open one."""
    own = for_job("secret", JOB)
    server = Credentials("secret", job=JOB)
    assert serve(hello(own), server, service)[0] is not None
    for credential in (for_job("secret", "another job"), for_job("guess", JOB), for_lease(own, JOB, "ab" * 16)):
        assert serve(hello(credential), server, service)[0] is None
    of_another = Credentials(for_job("secret", "another job"))
    for accepted in (Credentials("secret"), of_another, Credentials("other", job=JOB)):
        assert serve(hello(own), accepted, service)[0] is None


@pytest.mark.parametrize(
    ("start", "error"),
    [
        (b"GET / HTTP/1.", "does not speak RankMesh's protocol"),
        (preface(Service.STORE), "another service"),
        (b"RKMH-HI\x02\x01\r\n\r\n", "speaks protocol version 2, this one 3"),
    ],
)
def test_other_bytes_are_no_preface(start, error):
    with pytest.raises(ProtocolError, match=error):
        check_preface(start, Service.MESH)


@pytest.mark.parametrize(
    ("start", "found"),
    [
        (b"", None),
        (b"R", None),
        (preface(Service.STORE)[:12], None),
        (preface(Service.STORE), True),
        (b"GET / HTT", False),
        (b"RK\0", False),
    ],
)
def test_a_preface_is_told_from_http_by_its_first_bytes(start, found):
    assert is_preface(start) is found
    assert not found or service_of(start) is Service.STORE


@pytest.mark.parametrize("size", [0, 1, 0x1600 >> 1, MAX_CREDENTIAL_BYTES])
def test_a_hello_is_not_taken_for_tls(size):
    """Whatever its random name: the first byte after the PREFACE tells the two apart."""
    assert all(hello("x" * size, name=bytes([first]) * 64)[0] < RECORD[0] for first in range(256))


def test_a_credential_has_a_limit():
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        serve(hello("x" * (MAX_CREDENTIAL_BYTES + 1))[:HELLO_BYTES], "secret")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 ", "does not speak"),
        (b"RKMH-HI\x02\0", "protocol version 2, this one 3"),
        (welcome(Verdict.OTHER_SERVICE), "does not have this service"),
    ],
)
def test_other_bytes_are_no_welcome(answer, error):
    with pytest.raises(ProtocolError, match=error):
        understand(answer)
