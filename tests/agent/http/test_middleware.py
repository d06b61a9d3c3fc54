"""What gets past the guard of every HTTP service, called as an ASGI server calls it."""

from __future__ import annotations

import asyncio
import json

import pytest

from rankmesh_agent.http.middleware import Policy, SecurityMiddleware, problem, problem_of
from rankmesh_agent.wire.errors import CollectiveTimeoutError, DistStoreError, RankFailedError
from rankmesh_agent.wire.schemas import MAX_BODY_BYTES

LIMIT = 1000


class Echo:
    """An application that reads the whole body, then answers with its length."""

    def __init__(self, answer_first: bool = False) -> None:
        self.calls = 0
        self.answer_first = answer_first

    async def __call__(self, scope, receive, send):
        self.calls += 1
        if self.answer_first:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        length, more = 0, True
        while more:
            message = await receive()
            length += len(message["body"])
            more = message["more_body"]
        if not self.answer_first:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(length).encode()})


def ask(guard, path="/v1/info", method="GET", chunks=(b"",), **headers):
    """Return the status, headers and body of the answer to one request."""
    reported = {"host": "localhost:8000"} | {name.replace("_", "-"): value for name, value in headers.items()}
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in reported.items() if value is not None],
    }
    messages = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    messages[-1]["more_body"] = False
    sent = []

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    asyncio.run(guard(scope, receive, send))
    body = b"".join(message["body"] for message in sent[1:])
    return sent[0]["status"], dict(sent[0]["headers"]), body


def status(*args, **kwargs):
    return ask(*args, **kwargs)[0]


@pytest.fixture
def app():
    return Echo()


def guarded(app, token="", names=(), **options):
    return SecurityMiddleware(app, token, names, Policy(lambda *_: LIMIT, **options))


# The token


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"])
def test_every_path_and_method_wants_the_token(app, method):
    guard = guarded(app, "secret")
    paths = ("/", "/v1/info", "/metrics", "/docs", "/openapi.json", "/health/", "//health", "/v1/health")
    for number, path in enumerate(paths):
        assert status(guard, path, method) == 401, path
        assert status(guard, path, method, authorization="Bearer wrong") == 401, path
        assert app.calls == number
        assert status(guard, path, method, authorization="Bearer secret") == 200, path


def test_open_paths(app):
    for path in ("/health", "/livez", "/readyz"):
        assert status(guarded(app, "secret"), path) == 200
    guard = SecurityMiddleware(app, "secret", policy=Policy(open_paths={"/"}))
    for path, expected in {"/": 200, "/health": 200, "/page": 401, "//": 401, "/v1/info": 401}.items():
        assert status(guard, path) == expected, path
        assert status(guard, path, origin="http://evil.example") == 403


def test_what_is_not_the_token(app):
    for given in ("", "secret", "Basic secret", "Bearer", "Bearer ", "Bearer secret2", "Bearer secre", "Bearer \xe9"):
        assert status(guarded(app, "secret"), authorization=given) == 401, given
    assert app.calls == 0


def test_a_refusal_says_what_to_do(app):
    code, headers, body = ask(guarded(app, "secret"))
    assert code == 401
    assert headers[b"www-authenticate"] == b'Bearer realm="rankmesh"'
    assert headers[b"content-type"] == b"application/problem+json"
    assert int(headers[b"content-length"]) == len(body)
    reported = json.loads(body)
    assert reported["code"] == "unauthenticated"
    assert reported["status"] == 401
    assert "Bearer" in reported["detail"]
    assert "secret" not in reported["detail"]


def test_another_token_is_called_that_on_both_sides(app, caplog, monkeypatch):
    monkeypatch.setattr("rankmesh_agent.net.peer_credentials._warning._next", 0.0)
    stranger = f'RankMesh key="{"0" * 16}", client="c", count="1"'
    for given in ("Bearer", "Bearer "):
        assert "send the job's token" in json.loads(ask(guarded(app, "secret"), authorization=given)[2])["detail"]
    for given in ("Bearer another", stranger):
        body = ask(guarded(app, "secret"), authorization=given)[2]
        assert "the token of this service is another one than that given" in json.loads(body)["detail"]
    assert [record.message for record in caplog.records] == [
        "refused a connection: a client has another token than this service"
    ]


# Host and Origin


OUR_HOSTS = (
    *("localhost", "localhost:8000", "LocalHost:8000", "127.0.0.1", "127.0.0.1:8000", "10.1.2.3:80", "[::1]"),
    *("[::1]:8000", "[2001:db8::1]:8000", "::1", "trainer-2", "trainer-2:8000", "TRAINER-2"),
)
OTHER_HOSTS = (
    *("", None, "evil.com", "evil.com:8000", "trainer-2.evil.com", "127.0.0.1.evil.com", "localhost.evil.com"),
    *("[evil.com]", "evil.com:80:80", ":8000", "trainer-3", "127.0.0.1@evil.com", "256.0.0.1"),
)
OTHER_ORIGINS = (
    *("http://evil.com", "http://localhost", "http://localhost:8001", "http://localhost:8000.evil.com"),
    *("http://127.0.0.1:8000", "ws://localhost:8000", "null", ""),
)


def test_hosts_we_are_known_by(app):
    for host in OUR_HOSTS:
        assert status(guarded(app, names=["Trainer-2"]), host=host) == 200, host


@pytest.mark.parametrize("path", ["/health", "/v1/info"])
def test_other_hosts_are_refused(app, path):
    for host in OTHER_HOSTS:
        code, _, body = ask(guarded(app, names=["trainer-2"]), path, host=host)
        assert (code, json.loads(body)["code"]) == (421, "unknown-host"), host
    assert app.calls == 0


@pytest.mark.parametrize("origin", ["http://Trainer-2:8000", "https://trainer-2:8000", "HTTP://TRAINER-2:8000"])
def test_pages_of_our_own_may_ask(app, origin):
    assert status(guarded(app, names=["trainer-2"]), host="Trainer-2:8000", origin=origin) == 200


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
@pytest.mark.parametrize("path", ["/health", "/v1/info"])
def test_other_sites_pages_may_not(app, method, path):
    for origin in OTHER_ORIGINS:
        code, _, body = ask(guarded(app, "secret"), path, method, origin=origin, authorization="Bearer secret")
        assert (code, json.loads(body)["code"]) == (403, "foreign-origin"), origin
    assert app.calls == 0


# The body


@pytest.mark.parametrize(("length", "code"), [("0", 200), ("1000", 200), ("1001", 413), ("99999999999999999999", 413)])
def test_content_length_is_looked_at_before_the_body(app, length, code):
    assert status(guarded(app), method="PUT", content_length=length) == code
    assert app.calls == (code == 200)


def test_a_content_length_that_is_no_number_is_refused(app):
    for length in ("", "abc", "-1", "+1", "1.0", "1e3", "0x10", "1 000", "\xb2", "9" * 5000):
        assert 400 <= status(guarded(app), method="PUT", content_length=length) < 500, length
    assert app.calls == 0


@pytest.mark.parametrize(
    ("chunks", "code"),
    [
        ([b"x" * 1000], 200),
        ([b"x" * 500, b"x" * 500], 200),
        ([b"x" * 100] * 10 + [b""], 200),
        ([b"x" * 1001], 413),
        ([b"x" * 100] * 10 + [b"x"], 413),
    ],
)
def test_a_streamed_body_is_counted_as_it_arrives(app, chunks, code):
    got, _, body = ask(guarded(app), method="PUT", chunks=chunks)
    assert got == code
    if code == 200:
        assert body == b"1000"
    else:
        assert json.loads(body)["code"] == "body-too-large"


def test_a_body_longer_than_its_content_length_is_counted_too(app):
    assert status(guarded(app), method="PUT", content_length="1", chunks=[b"x" * 2000]) == 413


def test_an_answer_that_has_begun_is_not_begun_again():
    code, _, body = ask(guarded(Echo(answer_first=True)), method="PUT", chunks=[b"x" * 2000])
    assert (code, body) == (200, b"")


def test_the_limit_is_64_mib_unless_said_otherwise(app):
    assert MAX_BODY_BYTES == 64 << 20
    assert status(SecurityMiddleware(app), content_length=str(64 << 20)) == 200
    assert status(SecurityMiddleware(app), content_length=str((64 << 20) + 1)) == 413


# The rest


def test_an_applications_own_errors_pass():
    async def broken(scope, receive, send):
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        ask(guarded(broken))


def test_what_is_not_http_passes():
    seen = []

    async def app(scope, receive, send):
        seen.append((scope, receive, send))

    scope = {"type": "lifespan"}
    asyncio.run(SecurityMiddleware(app, "secret")(scope, "receive", "send"))
    assert seen == [(scope, "receive", "send")]


def test_problem_has_the_members_that_are_set():
    fixed = {"type": "about:blank", "title": "Conflict", "status": 409, "detail": "rank 2 is taken", "code": "taken"}
    assert problem(409, "taken", "rank 2 is taken", ranks=[2]).body() == {**fixed, "ranks": [2]}


def test_problem_of_an_error_has_its_data():
    assert problem_of(DistStoreError("no")).body()["code"] == "store-error"
    data = {"ranks": [2], "op": "all_reduce", "group": "world", "seq": 0, "address": "node2"}
    fixed = {"type": "about:blank", "title": "Service Unavailable", "status": 503, "code": "rank-failed"}
    error = RankFailedError("rank 2 died", **data)
    assert problem_of(error).body() == {**fixed, **data, "detail": "rank 2 died"}
    error.first_failure, error.retryable = "rank 1 died", True
    assert problem_of(error).body().items() >= {"first_failure": "rank 1 died", "retryable": True}.items()
    timeout = problem_of(CollectiveTimeoutError("waited for rank 1", ranks=[1])).body()
    assert (timeout["ranks"], timeout["missing_ranks"]) == ([1], [1])
    assert not {"first_failure", "retryable"} & timeout.keys()


@pytest.mark.parametrize(
    ("method", "path", "length", "status"),
    [
        ("POST", "/large", LIMIT * 2, 200),
        ("POST", "/large", LIMIT * 2 + 1, 413),
        ("POST", "/v1/info", LIMIT + 1, 413),
        ("PUT", "/large", LIMIT + 1, 413),
    ],
)
@pytest.mark.parametrize("reported", [True, False])
def test_some_requests_may_have_larger_bodies(method, path, length, status, reported):
    guard = SecurityMiddleware(
        Echo(),
        policy=Policy(lambda method, path: 2 * LIMIT if (method, path) == ("POST", "/large") else LIMIT),
    )
    headers = {"content_length": str(length)} if reported else {}
    found, _, body = ask(guard, path, method, (b"x" * LIMIT, b"x" * (length - LIMIT)), **headers)
    assert found == status
    assert status == 413 or body == str(length).encode()
