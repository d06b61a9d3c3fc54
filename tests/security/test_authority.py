"""TLS from the token: both ends prove that they know the credential that the client names, and nobody else does."""

from __future__ import annotations

import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rankmesh_agent.config.tls import TlsSettings
from rankmesh_agent.net import authority, tls
from rankmesh_agent.net.tls_socket import NoTlsError, OtherTokenError, TlsSocket
from rankmesh_agent.wire.credentials import (
    Credentials,
    Role,
    derive,
    for_job,
    for_lease,
    server_name,
    tls_secret,
)
from rankmesh_agent.wire.hello import ClientRefusedError

TOKEN = "0123456789abcdef" * 4
OWN = for_job(TOKEN, "train")
LEASE = for_lease(OWN, "train", "ab" * 16)


def shake_hands(given: str, accepted: str | Credentials, *, mutual: bool = True) -> tuple[object, object]:
    """Return what each end finds, the client and the server: its error, or None."""

    def of(end: TlsSocket) -> Exception | None:
        try:
            end.handshake()
            end.sendall(b"x")
            end.recv(1)  # the client learns only now whether its certificate is accepted
        except Exception as error:
            return error
        return None

    client_end, server_end = socket.socketpair()
    context = tls.server_context(TlsSettings(), accepted, mutual=mutual)
    with (
        tls.client_side(client_end, "there", 1, given) as client,
        TlsSocket(server_end, context, "a client") as server,
        ThreadPoolExecutor(1) as pool,
    ):
        for end in (client, server):
            end.settimeout(10)
        serving = pool.submit(of, server)
        found = of(client)
        client.close()
        return found, serving.result()


@pytest.mark.parametrize("mutual", [True, False], ids=["ranks", "HTTP"])
@pytest.mark.parametrize(
    ("given", "accepted"),
    [
        (TOKEN, TOKEN),
        ("a token of few bits", "a token of few bits"),
        (derive(TOKEN, Role.READ), TOKEN),
        ("users' own", Credentials(TOKEN, use="users' own")),
        (OWN, TOKEN),
        (OWN, OWN),
        (derive(OWN, Role.USE), TOKEN),
        (derive(OWN, Role.READ), OWN),
        (LEASE, TOKEN),
        (LEASE, OWN),
    ],
)
def test_both_ends_prove_that_they_know_the_credential(given, accepted, mutual):
    assert shake_hands(given, accepted, mutual=mutual) == (None, None)


@pytest.mark.parametrize("mutual", [True, False], ids=["ranks", "HTTP"])
@pytest.mark.parametrize(
    ("given", "accepted"),
    [
        ("another", TOKEN),
        (for_job("another", "train"), TOKEN),
        (for_job(TOKEN, "other"), OWN),
        (for_lease(for_job("another", "train"), "train", "ab" * 16), OWN),
        (TOKEN, OWN),
    ],
)
def test_another_credential_ends_the_handshake(given, accepted, mutual):
    client, server = shake_hands(given, accepted, mutual=mutual)
    assert isinstance(client, OtherTokenError)
    assert "has another token than this process: RANKMESH_TOKEN must be the same" in str(client)
    assert isinstance(server, ClientRefusedError | OSError)


def test_a_credential_that_is_claimed_must_be_known(monkeypatch):
    """A client with the role "read" names the token itself."""
    lesser = derive(TOKEN, Role.READ)
    monkeypatch.setattr(tls, "server_name", lambda credential: server_name(TOKEN))
    assert isinstance(shake_hands(lesser, TOKEN)[0], OtherTokenError)


def test_a_rank_without_a_certificate_is_refused():
    """One that would accept any server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    client_end, server_end = socket.socketpair()
    with ThreadPoolExecutor(1) as pool, tls.server_side(server_end, "a client", TOKEN, TlsSettings()) as server:
        serving = pool.submit(server.handshake)
        with client_end, pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
            context.wrap_socket(client_end, server_hostname=server_name(TOKEN)).recv(1)
        with pytest.raises(OSError, match="did not return a certificate"):
            serving.result()


def test_a_server_without_a_token_is_named():
    client_end, server_end = socket.socketpair()
    with tls.client_side(client_end, "there", 1, TOKEN) as client, server_end:
        client.settimeout(10)
        with pytest.raises(ConnectionAbortedError, match="neither certificates nor a token"):
            tls.server_side(server_end, "a client", "", TlsSettings())
        with pytest.raises(NoTlsError, match="RankMesh there has no token"):
            client.handshake()


def test_every_process_derives_the_same_authority():
    """Of the credential alone; what a network sees of it shows neither the credential nor a job's name."""
    assert authority.authority_pem(TOKEN) == authority.authority_pem(TOKEN)
    assert authority.authority_pem(OWN) == authority.authority_pem(Credentials(TOKEN).named(server_name(OWN)))
    assert len({authority.authority_pem(each) for each in (TOKEN, OWN, LEASE, derive(TOKEN, Role.READ))}) == 4
    for each in (TOKEN, OWN, LEASE):
        assert "train" not in server_name(each)
        assert TOKEN[:16] not in server_name(each)


def test_a_token_that_people_make_is_stretched():
    """A guess then takes a processor some 0.1 s; one of 128 random bits needs no such protection."""
    tls_secret.cache_clear()
    took = {}
    for token in ("correct horse battery staple", TOKEN):
        began = time.process_time()
        tls_secret(token)
        took[token] = time.process_time() - began
    assert took["correct horse battery staple"] > 20 * took[TOKEN]
