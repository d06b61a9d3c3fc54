"""FastAPI application whose errors are ``application/problem+json`` (RFC 9457), also in its OpenAPI document.

The agent and the gateway build on it; each has the meanings of its error statuses in ``routes/problems.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from http import HTTPStatus
from inspect import cleandoc
from typing import Any

import msgspec
from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import Message, Receive, Scope, Send

from rankmesh_agent.http.middleware import PROBLEM_TYPE, bug, problem, problem_of
from rankmesh_agent.wire import schemas
from rankmesh_agent.wire.errors import DistError
from rankmesh_agent.wire.json_text import InvalidBodyError
from rankmesh_agent.wire.schemas import Problem
from rankmesh_agent.wire.version import __version__

_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

_PROBLEM_CONTENT = {PROBLEM_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
# Not FastAPI's "model": it has no option for the media type, and compiles the class for every status of every route.

_PROBLEM_HEADERS: Mapping[int, dict[str, Any]] = {
    401: {"WWW-Authenticate": {"description": "The scheme.", "schema": {"type": "string"}}},
    429: {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}},
}

_SHOULD = re.compile(r"^\w+ should")
ANY_REQUEST = (400, 401, 403, 408, 413, 421, 429, 431)
"""Error statuses of every request: of the server and of SecurityMiddleware."""

Responses = dict[int | str, dict[str, Any]]


def problem_responses(meanings: Mapping[int, str]) -> Callable[..., Responses]:
    """Return a function from error statuses to the ``responses=`` of a route, given the meaning of each status."""

    def problems(*statuses: int) -> Responses:
        return {
            status: {
                "description": meanings[status],
                "content": _PROBLEM_CONTENT,
                **({"headers": _PROBLEM_HEADERS[status]} if status in _PROBLEM_HEADERS else {}),
            }
            for status in statuses
        }

    return problems


def from_state(name: str) -> Any:
    """Return the FastAPI dependency on an attribute of the application's state."""

    async def get(request: Request) -> Any:
        return getattr(request.app.state, name)

    return Depends(get)


class WebApplication(FastAPI):
    """FastAPI application that answers every error with a problem document.

    Args:
        service: the service in a word, for the text of internal errors.
        headers_of: returns the headers of the response to an error that rejects a request.
        bodies: the classes of requests' bodies, besides those of ``schemas``.
    """

    def __init__(
        self,
        title: str,
        description: str,
        service: str,
        headers_of: Callable[[Any], Mapping[str, str]] = lambda error: {},
        bodies: Sequence[type] = (),
        **options: Any,
    ) -> None:
        self._bodies = bodies
        super().__init__(
            title=title,
            description=description,
            version=__version__,
            docs_url=None,
            redoc_url=None,
            generate_unique_id_function=lambda route: route.name,
            **options,
        )

        async def on_error(_: Request, error: DistError) -> JSONResponse:
            return _problem_response(problem_of(error), headers_of(error))

        async def on_bug(request: Request, error: Exception) -> JSONResponse:
            return _problem_response(bug(service, request.method, request.url.path, error))

        self.exception_handler(DistError)(on_error)
        self.exception_handler(RequestValidationError)(_on_invalid_request)
        self.exception_handler(InvalidBodyError)(_on_invalid_body)
        self.exception_handler(HTTPException)(_on_http_error)
        self.exception_handler(ClientDisconnect)(_on_disconnect)
        self.exception_handler(Exception)(on_bug)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; HEAD as GET without the body."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await super().__call__(scope, receive, send)
            return
        complete = asyncio.get_running_loop().create_future()

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
            elif not complete.done():
                complete.set_result(None)
                await send({"type": "http.response.body"})

        response = asyncio.ensure_future(super().__call__({**scope, "method": "GET"}, receive, send_head))
        try:
            await asyncio.wait({response, complete}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            response.cancel()  # it may be an endless stream
        with contextlib.suppress(asyncio.CancelledError):
            await response

    def openapi(self) -> dict[str, Any]:
        """Return FastAPI's OpenAPI document, created once, with msgspec's schemas of the bodies and of the problems.

        The summary of an operation is the first sentence of its description, and not the name of a function.
        """
        if self.openapi_schema is None:
            components = super().openapi()["components"]["schemas"]
            kinds = [*(kind for kind in vars(schemas).values() if is_dataclass(kind)), *self._bodies]
            _, described = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
            for name in described.keys() & {*components, "Problem"}:
                components[name] = described[name] | {"description": cleandoc(described[name]["description"])}
            for operations in super().openapi()["paths"].values():
                for operation in operations.values():
                    operation["summary"] = re.split(r"[.:;](?:\s|$)", operation["description"], maxsplit=1)[0]
        return super().openapi()


def _problem_response(document: Problem, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(document.body(), document.status, headers, PROBLEM_TYPE)


async def _on_invalid_body(_: Request, error: InvalidBodyError) -> JSONResponse:
    return _problem_response(problem(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid-request", str(error)))


async def _on_invalid_request(request: Request, error: RequestValidationError) -> JSONResponse:
    given = request.headers.get("content-type", "").partition(";")[0]
    if given and "json" not in given and any(each["loc"] == ("body",) for each in error.errors()):
        detail = (
            f"{request.method} {request.url.path} takes a JSON object, and the body is {given}: send it with "
            "Content-Type: application/json (curl --json, not -d); /openapi.json has its fields"
        )
    else:
        detail = "; ".join(f"{'.'.join(map(str, each['loc']))}: {_words(each)}" for each in error.errors())
    return _problem_response(problem(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid-request", detail))


def _words(error: Mapping[str, Any]) -> str:
    """Return what is wrong with a value, as the predicate of a sentence."""
    if error.get("type") == "missing":
        return "is missing"
    if error["loc"] == ("body",):
        return "must be a JSON object"
    return _SHOULD.sub("must", error["msg"].removeprefix("Value error, "), count=1)


async def _on_http_error(request: Request, error: HTTPException) -> JSONResponse:
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "-")
    detail = f"{request.method} {request.url.path}: {error.detail}; /openapi.json lists the endpoints"
    headers = error.headers
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers = {"Allow": ", ".join(sorted(_allowed_methods(request)))}  # the router's lists the first route's
    return _problem_response(problem(error.status_code, code, detail), headers)


def _allowed_methods(request: Request) -> set[str]:
    """Return the methods of a request's path."""
    found = {
        method
        for method in _METHODS
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in request.app.routes)
    }
    return found | {"HEAD"} if "GET" in found else found


async def _on_disconnect(_: Request, __: ClientDisconnect) -> Response:
    return Response(
        status_code=HTTPStatus.BAD_REQUEST
    )  # no client reads it; without it, a disconnect would be an internal error
