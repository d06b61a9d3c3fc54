"""Codes and sessions of the dashboard: once, for a time, to read only."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import httpx
import pytest

from rankmesh_agent.wire.credentials import Credentials, Grant, Role, derive, for_job
from rankmesh_agent.wire.errors import AuthenticationError
from rankmesh_gateway.http import dashboard_sessions
from rankmesh_gateway.http.app import create_app
from rankmesh_gateway.http.dashboard_sessions import CODE_SECONDS, SESSION_SECONDS, DashboardSessions

READ = f"Bearer {Credentials('secret').of_role(Role.READ)}".encode()
AT_EXCHANGE = {"method": "POST", "path": "/v1/dashboard/sessions", "headers": ()}
AT_RANKS = {"method": "GET", "path": "/v1/ranks", "headers": ()}
AT_STACKS = {"method": "GET", "path": "/v1/ranks/2/snapshot", "headers": ()}
READS, RUNS = Grant(Role.READ), Grant(Role.RUN)


@pytest.fixture
def clock() -> SimpleNamespace:
    return SimpleNamespace(now=1000.0)


@pytest.fixture
def sessions(clock: SimpleNamespace) -> DashboardSessions:
    return DashboardSessions(Credentials("secret"), lambda: clock.now)


def bearer(token: str) -> bytes:
    return f"Bearer {token}".encode()


def test_a_code_is_accepted_once_and_at_one_path(sessions):
    code = sessions.create_code(READS)
    assert sessions.translate(bearer(code), AT_EXCHANGE) == READ
    assert sessions.translate(bearer(code), AT_RANKS) == b""
    session = sessions.exchange(bearer(code).decode())
    assert sessions.translate(bearer(code), AT_EXCHANGE) == b""
    with pytest.raises(AuthenticationError, match="has been used or has expired: 'rankmesh dashboard'"):
        sessions.exchange(bearer(code).decode())
    assert sessions.translate(bearer(session), AT_RANKS) == READ
    assert sessions.translate(bearer(session), AT_EXCHANGE) == b""


def test_codes_and_sessions_expire(sessions, clock):
    used, late = sessions.create_code(READS), sessions.create_code(READS)
    session = sessions.exchange(bearer(used).decode())
    clock.now += CODE_SECONDS
    assert sessions.translate(bearer(late), AT_EXCHANGE) == b""
    with pytest.raises(AuthenticationError):
        sessions.exchange(bearer(late).decode())
    clock.now += SESSION_SECONDS - CODE_SECONDS - 1
    assert sessions.translate(bearer(session), AT_RANKS) == READ
    clock.now += 1
    assert sessions.translate(bearer(session), AT_RANKS) == b""


def test_other_headers_stay(sessions):
    for header in (b"", b"Bearer secret", b'RankMesh key="0"', b"Basic rankmesh-dashboard-code-x"):
        assert sessions.translate(header, AT_RANKS) == header
    assert sessions.translate(b"Bearer rankmesh-dashboard-session-guess", AT_RANKS) == b""


@pytest.mark.parametrize("job", [None, "train"])
def test_stacks_need_a_code_of_the_role_run(sessions, job: str | None):
    """A session of such a code reads them, and has no further right; it is of the code's job."""
    for role in Role:
        session = sessions.exchange(bearer(sessions.create_code(Grant(role, job))).decode())
        token = "secret" if job is None else for_job("secret", job)
        run, read = bearer(token), bearer(derive(token, Role.READ))
        assert sessions.translate(bearer(session), AT_STACKS) == (run if role is Role.RUN else read)
        for method, path in [
            ("GET", "/v1/ranks"),
            ("POST", "/v1/ranks/2/snapshot"),
            ("GET", "/v1/ranks/2/snapshot/x"),
            ("POST", "/v1/groups"),
            ("GET", "/v1/ranks/2/snapshot\n"),
        ]:
            assert sessions.translate(bearer(session), {**AT_RANKS, "method": method, "path": path}) == read


def test_the_cookie_of_a_session(sessions):
    """It counts like its token, for the port of the gateway, and in requests of the gateway's own page."""
    session = sessions.exchange(bearer(sessions.create_code(READS)).decode()).encode()

    def seen(cookie: bytes, host: bytes = b"localhost:8700", authorization: bytes = b"", **more: bytes) -> bytes:
        more_headers = [(name.replace("_", "-").encode(), value) for name, value in more.items()]
        headers = [(b"host", host), (b"cookie", cookie), *more_headers]
        return sessions.translate(authorization, {**AT_RANKS, "headers": headers})

    cookie = b"a=b; rankmesh-session-8700=" + session
    for site in ({}, {"sec_fetch_site": b"same-origin"}, {"sec_fetch_site": b"none"}):
        assert seen(cookie, **site) == READ
    for site in (b"same-site", b"cross-site"):
        assert seen(cookie, sec_fetch_site=site) == b""
    assert seen(cookie, host=b"localhost:8701") == seen(cookie, host=b"localhost") == b""
    assert seen(b"rankmesh-session-8700=secret") == seen(b"rankmesh-session-8700") == b""
    assert seen(cookie, authorization=b"Bearer other") == b"Bearer other"
    sessions.end(session)
    assert seen(cookie) == b""


def test_a_browser_keeps_the_cookie_from_scripts_and_other_sites():
    async def flow() -> None:
        transport = httpx.ASGITransport(create_app(token="secret"), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="https://127.0.0.1:8700") as client:
            code = (await client.post("/v1/dashboard/codes", headers={"Authorization": "Bearer secret"})).json()["code"]
            made = await client.post("/v1/dashboard/sessions", headers={"Authorization": f"Bearer {code}"})
            kept = made.headers["set-cookie"].split("; ")
            assert kept[0].startswith("rankmesh-session-8700=rankmesh-dashboard-session-")
            assert kept[1:] == ["HttpOnly", "Path=/", "SameSite=strict", "Secure"]
            assert (await client.get("/v1/overview")).status_code == 200
            assert (await client.post("/v1/leave", json={})).status_code == 403
            token = dict(client.cookies)
            assert (await client.delete("/v1/dashboard/sessions")).json() == {"ok": True}
            assert not client.cookies
            client.cookies.update(token)
            assert (await client.get("/v1/overview")).status_code == 401

    asyncio.run(flow())


def test_there_is_a_limit(sessions, monkeypatch):
    monkeypatch.setattr(dashboard_sessions, "MAX_TOKENS", 2)
    oldest, *others = (sessions.create_code(READS) for _ in range(3))
    assert sessions.translate(bearer(oldest), AT_EXCHANGE) == b""
    assert all(sessions.translate(bearer(code), AT_EXCHANGE) == READ for code in others)


def test_a_session_reads_and_cannot_outlive_itself():
    async def flow() -> list[int]:
        transport = httpx.ASGITransport(create_app(token="secret"), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8700") as client:

            async def ask(method: str, path: str, token: str) -> httpx.Response:
                return await client.request(method, path, headers={"Authorization": f"Bearer {token}"})

            found = [
                await ask("POST", "/v1/dashboard/codes", "guess"),
                await ask("POST", "/v1/dashboard/codes", "secret"),
            ]
            code = found[-1].json()["code"]
            found += [await ask("GET", "/v1/ranks", code), await ask("POST", "/v1/dashboard/sessions", code)]
            session = found[-1].json()["token"]
            assert {found[1].headers["cache-control"], found[3].headers["cache-control"]} == {"no-store"}
            found += [await ask("POST", "/v1/dashboard/sessions", each) for each in (code, "secret", session)]
            found += [
                await ask("GET", path, session)
                for path in ("/v1/ranks", "/v1/overview", "/v1/rates", "/v1/diagnosis", "/v1/ranks/0/snapshot")
            ]
            found += [await ask("POST", path, session) for path in ("/v1/leave", "/v1/dashboard/codes")]
            return [response.status_code for response in found]

    assert asyncio.run(flow()) == [401, 201, 401, 201, 401, 401, 401, 200, 200, 200, 200, 404, 403, 401]
