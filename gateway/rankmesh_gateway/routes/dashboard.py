"""The dashboard: a page for people, without data and so without a token; it asks for both itself."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Header, HTTPException, Response
from fastapi.responses import HTMLResponse

from rankmesh_gateway import dashboard
from rankmesh_gateway.routes.problems import documented

router = APIRouter(tags=["dashboard"], responses=documented(403, 413, 421))

IfNoneMatch = Annotated[str, Header(description="The ETag of what the client has; 304 when it is the same.")]
_UNCHANGED = {304: {"description": "The client has it already."}}


@router.get("/", response_class=HTMLResponse, responses=_UNCHANGED)
async def page(if_none_match: IfNoneMatch = "") -> Response:
    """Show the cluster in a browser."""
    return _answer(dashboard.PAGE, if_none_match)


@router.get(dashboard.PREFIX + "{name}", include_in_schema=False)
async def part(name: str, if_none_match: IfNoneMatch = "") -> Response:
    """Return a part of the page."""
    if name not in dashboard.names() - {dashboard.PAGE}:
        raise HTTPException(HTTPStatus.NOT_FOUND, "the dashboard has no such part")
    return _answer(name, if_none_match)


def _answer(name: str, if_none_match: str) -> Response:
    file = dashboard.file(name)
    headers = {**dashboard.HEADERS, "etag": file.etag}
    if file.matches(if_none_match):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return Response(file.body, headers=headers, media_type=file.media_type)
