"""The dashboard's page and its parts; without data, and so without a token: the page asks the user for it."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import HTMLResponse

from rankmesh_agent.http.application import Responses
from rankmesh_gateway import dashboard
from rankmesh_gateway.http.routes.problems import problems

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


def _response(name: str, request: Request) -> Response:
    file = dashboard.file(name)
    headers = {**dashboard.HEADERS, "etag": file.etag}
    if file.matches(request.headers.get("if-none-match", "")):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return Response(file.body, headers=headers, media_type=file.media_type)
