"""The dashboard's page and its parts, without data, and so without a token; and the sessions for its data."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import HTMLResponse

from rankmesh_agent.http.application import Responses
from rankmesh_agent.wire.schemas import Done
from rankmesh_gateway import dashboard
from rankmesh_gateway.http.dashboard_sessions import (
    CODE_SECONDS,
    CODES_PATH,
    EXCHANGE_PATH,
    SESSION_SECONDS,
    cookie_name,
    cookie_of,
)
from rankmesh_gateway.http.routes.dependencies import BEARER, ServicesDep, grant_of
from rankmesh_gateway.http.routes.problems import problems
from rankmesh_gateway.schemas import DashboardCode, DashboardSession

router = APIRouter(tags=["dashboard"], responses=problems(503))

_UNCHANGED: Responses = {304: {"description": "The client's If-None-Match has the ETag."}}
_PARTS = sorted(dashboard.names() - {dashboard.PAGE})
_PART: Responses = {200: {"content": {dashboard.media_type(name): {"schema": {"type": "string"}} for name in _PARTS}}}
_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "enum": _PARTS}}


@router.get("/", response_class=HTMLResponse, responses=_UNCHANGED)
async def page(request: Request) -> Response:
    """Return the page that shows the cluster in a browser."""
    return _response(dashboard.PAGE, request)


@router.get(
    dashboard.PREFIX + "{name}",
    response_class=Response,
    responses=_PART | _UNCHANGED | problems(404),
    openapi_extra={"parameters": [_NAME]},
)
async def part(request: Request) -> Response:
    """Return a part of the page."""
    name = request.path_params["name"]
    if name not in _PARTS:
        raise HTTPException(HTTPStatus.NOT_FOUND, "the dashboard has no such part")
    return _response(name, request)


@router.post(CODES_PATH, status_code=HTTPStatus.CREATED, dependencies=[BEARER], responses=problems(401))
async def create_code(request: Request, services: ServicesDep, response: Response) -> DashboardCode:
    """Make a code that opens the dashboard once: `http://…/#code=…` in a browser (`rankmesh dashboard`)."""
    response.headers["cache-control"] = "no-store"
    return DashboardCode(services.sessions.create_code(grant_of(request)), CODE_SECONDS)


@router.post(EXCHANGE_PATH, status_code=HTTPStatus.CREATED, dependencies=[BEARER], responses=problems(401))
async def create_session(services: ServicesDep, request: Request, response: Response) -> DashboardSession:
    """Exchange a code, sent as the bearer token, for a session with the role `read`: a cookie, and its bearer token.

    If the code was made with the role `run`, the session also gets the stacks of ranks (`/v1/ranks/{rank}/snapshot`).
    """
    response.headers["cache-control"] = "no-store"
    token = services.sessions.exchange(request.headers.get("authorization", ""))
    response.set_cookie(value=token, **_cookie(request))
    return DashboardSession(token, SESSION_SECONDS)


@router.delete(EXCHANGE_PATH, dependencies=[BEARER], responses=problems(401))
async def end_session(services: ServicesDep, request: Request, response: Response) -> Done:
    """End the session of the cookie."""
    services.sessions.end(cookie_of(request.scope))
    response.delete_cookie(**_cookie(request))
    return Done()


def _cookie(request: Request) -> dict[str, Any]:
    name = cookie_name(request.headers.get("host", "").encode())
    secure = request.url.scheme == "https"
    return {"key": name, "path": "/", "secure": secure, "httponly": True, "samesite": "strict"}


def _response(name: str, request: Request) -> Response:
    file = dashboard.file(name)
    headers = {**dashboard.HEADERS, "etag": file.etag}
    if file.matches(request.headers.get("if-none-match", "")):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return Response(file.body, headers=headers, media_type=file.media_type)
