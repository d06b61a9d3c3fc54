"""HTTP: the token never travels, and nothing is used that its sender cannot prove."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rankmesh_agent.diagnostics.probe import measure
from rankmesh_agent.http import middleware
from rankmesh_agent.http.middleware import SecurityMiddleware
from rankmesh_agent.http.server import HttpServer
from rankmesh_agent.net.http_client import HttpClient, NoResponseError
from rankmesh_agent.net.sockets import bind
from rankmesh_agent.store.client import StoreClient
from rankmesh_agent.store.commands import Set
from rankmesh_agent.wire import http_auth
from rankmesh_agent.wire.credentials import ROLES, Credentials, Grant, Role, derive, for_job, for_lease
from rankmesh_agent.wire.errors import AuthenticationError, DistNetworkError
from rankmesh_agent.wire.http_auth import (
    UNKNOWN_KEY,
    AuthenticatedClient,
    Authenticator,
    MissingProofError,
    ReceivedResponse,
    ServerSession,
    SignedRequest,
    digest,
    exchange,
)
from rankmesh_gateway.clients.agent_client import AgentClient

TOKEN = "the secret of this job"
FORGED = b'{"ok": true}'


class Impostor:
    """A process on a squatted port, which records what it receives and answers anything."""

    def __init__(self, status: str, challenge: str = "") -> None:
        self.received = b""
        self._answer = (
            f"HTTP/1.1 {status}\r\nWWW-Authenticate: {challenge}\r\nContent-Length: {len(FORGED)}\r\n"
            "Connection: close\r\n\r\n"
        ).encode() + FORGED
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                client = self._listener.accept()[0]
            except OSError:
                return
            with client, contextlib.suppress(OSError):
                client.settimeout(10)
                self.received += client.recv(1 << 16)
                client.sendall(self._answer)
                client.shutdown(socket.SHUT_WR)
                while data := client.recv(1 << 16):
                    self.received += data

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)


@pytest.fixture(params=["200 OK", "404 Not Found", "401 Unauthorized"])
def impostor(request: pytest.FixtureRequest) -> Iterator[Impostor]:
    nonce = 'RankMesh nonce="00000000000000000000000000000000", mac="00"'
    made = Impostor(request.param, nonce if "401" in request.param else "")
    yield made
    made.close()


def http_client(url: str) -> Any:
    with contextlib.closing(HttpClient(TOKEN)) as client:
        response = client.request("POST", f"{url}/v1/join", {"body": "of the job"}, timeout=10)
    assert response.body != FORGED, "nothing of the answer is used"
    if response.status == 401:
        raise AuthenticationError("refused")
    return response


def store_client(url: str) -> Any:
    with contextlib.closing(StoreClient(url, TOKEN)) as store:
        store.execute(Set("k", b"body of the job"))


def agent_client(url: str) -> Any:
    reply = asyncio.run(
        AgentClient(TOKEN).request("POST", f"{url}/v1/groups", {"body": "of the job"}, job="train", seconds=10)
    )
    assert reply.document != {"ok": True}
    if not reply.ok:
        raise AuthenticationError(reply.detail)


def probe(url: str) -> Any:
    reply = measure(url, TOKEN, 10, 5.0)
    if not reply.reached:
        raise AuthenticationError(reply.error)


@pytest.mark.parametrize("client", [http_client, store_client, agent_client, probe])
def test_an_impostor_gets_no_token_and_its_answers_are_refused(client: Callable[[str], Any], impostor: Impostor):
    """At a gateway's address, a store's (no downgrade after a 404 to the upgrade), an agent's."""
    with pytest.raises(DistNetworkError):
        client(impostor.url)
    assert impostor.received
    assert TOKEN.encode() not in impostor.received
    assert b"Bearer" not in impostor.received
    assert b"of the job" not in impostor.received, "nothing is sent before the server has proved itself"


def test_an_unproven_error_of_a_server_is_no_answer():
    made = Impostor("503 Service Unavailable")
    with contextlib.closing(HttpClient(TOKEN)) as client, pytest.raises(NoResponseError):
        client.request("GET", made.url + "/", timeout=10)
    made.close()


FIELDS = {"method": "PUT", "target": "/v1/store/k?a=1", "host": "node:8701", "headers": {"if-match": '"1"'}}


def signed(session: ServerSession, body: bytes = b"value") -> SignedRequest:
    return session.sign(body=body, **FIELDS)


def check(server: Authenticator, request: SignedRequest, **changed: Any) -> AuthenticatedClient | str:
    return server.authenticate(request.authorization, **FIELDS | changed)


@pytest.fixture
def server() -> Authenticator:
    return Authenticator(Credentials(TOKEN))


def connect(server: Authenticator, credential: str = TOKEN) -> ServerSession:
    session = ServerSession(credential)
    hello = session.hello()
    assert session.accept_challenge(hello, str(check(server, hello)))
    return session


def test_a_replayed_request_is_refused(server):
    session = connect(server)
    request = signed(session)
    assert isinstance(check(server, request), AuthenticatedClient)
    assert isinstance(check(server, request), str)
    late, last = signed(session), [signed(session) for _ in range(2000)][-1]
    assert isinstance(check(server, last), AuthenticatedClient)
    assert isinstance(check(server, late), str), "too old to be known as new"


def test_requests_that_overtake_each_other_are_accepted_once(server):
    session = connect(server)
    requests = [signed(session) for _ in range(100)]
    for request in reversed(requests):
        assert isinstance(check(server, request), AuthenticatedClient)
    assert all(isinstance(check(server, request), str) for request in requests)


def test_a_request_is_worth_nothing_at_another_server_of_the_same_token(server):
    assert isinstance(check(Authenticator(Credentials(TOKEN)), signed(connect(server))), str)


@pytest.mark.parametrize(
    "changed",
    [{"method": "POST"}, {"target": "/v1/store/other?a=1"}, {"host": "other:8701"}, {"headers": {"if-match": "*"}}],
    ids=lambda changed: next(iter(changed)),
)
def test_a_changed_request_is_refused(server, changed):
    assert isinstance(check(server, signed(connect(server)), **changed), str)


@pytest.mark.parametrize(
    "added",
    [
        ("if-match", '"2"'),
        ("if-match", "*"),
        ("if-none-match", "*"),
        ("if-none-match", ""),
        ("content-type", "a/b"),
        ("idempotency-key", "another"),
        ("rankmesh-dtype", "int8"),
        ("rankmesh-shape", "1"),
    ],
)
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_no_field_can_be_added_to_a_request(first, added):
    """A second line of a field, before or behind the client's own, and a field that the client has left out."""
    body, sent = b"value", []
    headers = {"content-type": "application/octet-stream", "if-match": '"1"'}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def receive() -> Any:
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            sent.append(message)

    def request(authorization: str, method: str, fields: Any) -> int:
        lines = [(b"host", b"127.0.0.1"), (b"authorization", authorization.encode())]
        lines += [(name.encode(), value.encode()) for name, value in fields]
        scope = {"type": "http", "method": method, "path": "/v1/store/k", "headers": lines, "scheme": "http"}
        asyncio.run(guarded(scope, receive, send))
        return int(sent[-1]["status"])

    guarded = SecurityMiddleware(app, TOKEN)
    session = ServerSession(TOKEN)
    hello = session.hello()
    assert request(hello.authorization, "GET", []) == 401
    assert session.accept_challenge(hello, dict(sent[-1]["headers"])[b"www-authenticate"].decode())

    def proof() -> str:
        return session.sign("PUT", "/v1/store/k", "127.0.0.1", headers, body).authorization

    assert request(proof(), "PUT", headers.items()) == 204
    own = list(headers.items())
    assert request(proof(), "PUT", [added, *own] if first else [*own, added]) == 401


def test_a_changed_response_is_refused(server):
    request = signed(connect(server))
    caller = check(server, request)
    assert isinstance(caller, AuthenticatedClient)
    info = caller.sign_response(200, digest(b"value"))
    assert request.digest_of_response(200, info) == digest(b"value")
    assert request.digest_of_response(404, info) is None
    assert request.digest_of_response(200, info.replace(digest(b"value"), digest(b"other"))) is None
    assert signed(connect(server)).digest_of_response(200, info) is None, "of another request"


def test_a_changed_body_of_a_response_is_refused(server):
    session = connect(server)
    for received, refused in ((b"value", False), (b"other", True)):
        script = exchange(session, **FIELDS)
        caller = server.authenticate(next(script).authorization, **FIELDS)
        assert isinstance(caller, AuthenticatedClient)
        response = ReceivedResponse(200, "", caller.sign_response(200, digest(b"value")), received)
        with pytest.raises(MissingProofError if refused else StopIteration):
            script.send(response)


def test_the_memory_of_counts_is_bounded(server, monkeypatch):
    monkeypatch.setattr(http_auth, "MAX_CLIENTS", 3)
    sessions = [connect(server) for _ in range(4)]
    for session in sessions[:3]:
        assert isinstance(check(server, signed(session)), AuthenticatedClient)
    requests = [signed(session) for session in sessions]
    refusal = check(server, requests[3])
    assert isinstance(refusal, str)
    assert len(server._seen) == 0
    assert sessions[3].accept_challenge(requests[3], refusal)
    assert isinstance(check(server, signed(sessions[3])), AuthenticatedClient)
    assert isinstance(check(server, requests[0]), str), "of the nonce before"


def test_a_wrong_token_learns_nothing(server):
    session = ServerSession("guess")
    hello = session.hello()
    assert check(server, hello) == 'RankMesh realm="rankmesh"'
    assert not session.accept_challenge(hello, str(check(server, hello)))


async def respond(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"here"})


def ask(guard: Any, authorization: str, body: bytes = b"", **scope: Any) -> tuple[int, bytes]:
    sent: list[Any] = []
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    asked = {"type": "http", "method": "POST", "path": "/v1/x", "query_string": b"", "client": ("10.0.0.9", 1)} | scope
    asked["headers"] = [(b"host", b"10.0.0.1:80"), (b"authorization", authorization.encode())]

    async def receive():
        return messages.pop()

    async def send(message):
        sent.append(message)

    asyncio.run(guard(asked, receive, send))
    return sent[0]["status"], dict(sent[0]["headers"]).get(b"www-authenticate", b"")


def test_guesses_of_a_token_are_limited_and_first_requests_are_not(monkeypatch):
    monkeypatch.setattr(middleware, "UNAUTHENTICATED_A_SECOND", 0)
    monkeypatch.setattr(middleware, "_UNAUTHENTICATED_AT_ONCE", 5)
    guard = SecurityMiddleware(respond, TOKEN)
    assert [ask(guard, ServerSession(TOKEN).hello().authorization)[0] for _ in range(10)] == [401] * 10
    guesses = [ask(guard, ServerSession(f"guess {number}").hello().authorization)[0] for number in range(7)]
    assert guesses == [401] * 5 + [429] * 2


def test_a_body_that_is_not_the_signed_one_is_refused():
    guard = SecurityMiddleware(respond, TOKEN)
    session = ServerSession(TOKEN)
    hello = session.hello()
    assert session.accept_challenge(hello, ask(guard, hello.authorization)[1].decode())
    for body, status in ((b"signed", 200), (b"another", 401)):
        request = session.sign("POST", "/v1/x", "10.0.0.1:80", {}, b"signed")
        assert ask(guard, request.authorization, body)[0] == status


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
    assert ask(guard, f"Bearer {TOKEN}", **scope)[0] == status
    assert ask(guard, "Bearer guess", **scope)[0] == 401


@pytest.mark.parametrize("role", ROLES)
def test_a_proof_shows_the_role_of_its_credential(server, role):
    caller = check(server, signed(connect(server, Credentials(TOKEN).of_role(role))))
    assert isinstance(caller, AuthenticatedClient)
    assert caller.grant.role is role


def test_a_proof_shows_the_job_and_the_lease_of_its_credential(server):
    own, lease = for_job(TOKEN, "größer"), "ab" * 16
    for credential, grant in [
        *[(derive(own, role), Grant(role, "größer")) for role in ROLES],
        (for_lease(own, "größer", lease), Grant(Role.LEASE, "größer", lease)),
    ]:
        caller = check(server, signed(connect(server, credential)))
        assert isinstance(caller, AuthenticatedClient)
        assert caller.grant == grant


@pytest.mark.parametrize("job", ["", "0", "zz", "-", "00" * 4000, "ff", "747261696e0a"])
@pytest.mark.parametrize("lease", ["", "ab", "-" * 32, "ab" * 16])
def test_a_proof_that_names_no_job_of_its_key_is_refused(server, job, lease):
    """In whatever way it is broken, and if the key is that of another job."""
    key = ServerSession(for_job(TOKEN, "train")).hello().authorization.split('"')[1]
    named = f'RankMesh key="{key}", job="{job}", lease="{lease}", client="1", count="1"'
    assert server.authenticate(named, **FIELDS) == UNKNOWN_KEY


@pytest.fixture
def counted() -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """The URL of a server, and the paths of the requests to it with the statuses of their responses."""
    seen: list[tuple[str, int]] = []
    guards = [SecurityMiddleware(respond, TOKEN)]

    async def count(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for event in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{event}.complete"})
            return

        async def note(message: Any) -> None:
            if message["type"] == "http.response.start":
                seen.append((scope["path"], message["status"]))
            await send(message)

        if scope["path"] == "/restart" and len(guards) == 1:
            guards.append(SecurityMiddleware(respond, TOKEN))
        await guards[-1](scope, receive, note)

    server = HttpServer(bind("127.0.0.1", 0, purpose="a test"), token=TOKEN)
    server.start(lambda: count)
    yield server.url(), seen
    server.close()


def test_a_process_sends_one_request_more_to_a_server(counted):
    """Whatever the number of its clients; and one more after the server's restart."""
    url, seen = counted
    for path in ("/a", "/b", "/restart", "/c"):
        with contextlib.closing(HttpClient(TOKEN)) as client:
            assert client.request("POST", url + path, {"a": 1}, timeout=10).body == b"here"
    assert seen == [("/livez", 401), ("/a", 200), ("/b", 200), ("/restart", 401), ("/restart", 200), ("/c", 200)]


def test_a_forked_child_does_not_repeat_its_parents_counts(counted):
    url, seen = counted
    with contextlib.closing(HttpClient(TOKEN)) as client:
        client.request("GET", f"{url}/parent", timeout=10)
    child = os.fork()
    if child == 0:
        try:
            os._exit(HttpClient(TOKEN).request("GET", f"{url}/child", timeout=10).status != 200)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert seen == [("/livez", 401), ("/parent", 200), ("/livez", 401), ("/child", 200)]
