"""The dashboard's page and its parts, without data, and so without a token; and the sessions for its data."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from rankmesh_agent.http.middleware import PROBLEM_TYPE, problem
from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.schemas import Done
from rankmesh_gateway import dashboard
from rankmesh_gateway.http.dashboard_sessions import CODE_SECONDS, SESSION_SECONDS, cookie_name, cookie_of
from rankmesh_gateway.http.handlers import Services
from rankmesh_gateway.http.replies import Reply, Request, described
from rankmesh_gateway.schemas import DashboardCode, DashboardSession

_PARTS = sorted(dashboard.names() - {dashboard.PAGE})
_UNCHANGED = {304: {"description": "The client's If-None-Match has the ETag."}}
PAGE = described("text/html")
PAGE["responses"] |= _UNCHANGED
PART: dict[str, Any] = described(*{dashboard.media_type(name): None for name in _PARTS})
PART["responses"] |= _UNCHANGED
PART["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string", "enum": _PARTS}}]


def page(_: Services, request: Request) -> Reply:
    """Return the page that shows the cluster in a browser."""
    return _file(dashboard.PAGE, request)


def part(_: Services, request: Request) -> Reply:
    """Return a part of the page."""
    path = request.scope["path"]
    if path not in dashboard.paths():
        text = f"GET {path}: the dashboard has no such part; /openapi.json lists the endpoints"
        content = json_text.encode(problem(HTTPStatus.NOT_FOUND, "not-found", text).body())
        return Reply(content, {"content-type": PROBLEM_TYPE}, HTTPStatus.NOT_FOUND)
    return _file(path.removeprefix(dashboard.PREFIX), request)


def create_code(services: Services, request: Request) -> DashboardCode:
    """Make a code that opens the dashboard once: `http://…/#code=…` in a browser (`rankmesh dashboard`)."""
    request.headers["cache-control"] = "no-store"
    return DashboardCode(services.sessions.create_code(request.scope["state"]["grant"]), CODE_SECONDS)


def create_session(services: Services, request: Request) -> DashboardSession:
    """Exchange a code, sent as the bearer token, for a session with the role `read`: a cookie, and its bearer token.

    If the code was made with the role `run`, the session also gets the stacks of ranks (`/v1/ranks/{rank}/snapshot`).
    """
    token = services.sessions.exchange(request.header("authorization"))
    request.headers.update({"cache-control": "no-store", "set-cookie": _cookie(request, token)})
    return DashboardSession(token, SESSION_SECONDS)


def end_session(services: Services, request: Request) -> Done:
    """End the session of the cookie."""
    services.sessions.end(cookie_of(request.scope))
    request.headers["set-cookie"] = _cookie(request, "") + "; Max-Age=0"
    return Done()


def _cookie(request: Request, value: str) -> str:
    secure = "; Secure" if request.scope.get("scheme") == "https" else ""
    return f"{cookie_name(request.header('host').encode())}={value}; HttpOnly; Path=/; SameSite=strict{secure}"


def _file(name: str, request: Request) -> Reply:
    file = dashboard.file(name)
    headers = {**dashboard.HEADERS, "etag": file.etag}
    if file.matches(request.header("if-none-match")):
        return Reply(b"", headers, HTTPStatus.NOT_MODIFIED)
    return Reply(file.body, {**headers, "content-type": file.media_type})
