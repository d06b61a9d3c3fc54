"""A web application whose errors are ``application/problem+json`` (RFC 9457), in answers and in the OpenAPI document.

The agent's and the gateway's are made of this. What an error's status means there is theirs: ``routes/problems.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import Message, Receive, Scope, Send

from rankmesh_agent.http.middleware import PROBLEM_TYPE, bug, problem, problem_of
from rankmesh_agent.wire.errors import DistError
from rankmesh_agent.wire.schemas import Problem
from rankmesh_agent.wire.version import __version__

ProblemResponse = tuple[Problem, Mapping[str, str]]
"""The problem document that a request is refused with, and the headers that go with it."""

_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

Responses = dict[int | str, dict[str, Any]]
"""What FastAPI takes as ``responses=``."""


def problem_responses(meanings: Mapping[int, str]) -> Callable[..., Responses]:
    """Return a function of error statuses, which returns the ``responses=`` of a route that may answer with them.

    Args:
        meanings: what each status means.
    """

    def documented(*statuses: int) -> Responses:
        return {status: {"model": Problem, "description": meanings[status]} for status in statuses}

    return documented


class WebApplication(FastAPI):
    """FastAPI, with every error a problem document.

    Args:
        title: of the service, and its OpenAPI document.
        description: the same in a sentence.
        whose: the service in a word; its log says where it failed.
        refused: errors that say why a request is refused.
        refusal: how such an error is answered.
        options: FastAPI's.
    """

    def __init__(
        self,
        title: str,
        description: str,
        whose: str,
        refused: tuple[type[Exception], ...] = (DistError,),
        refusal: Callable[[Any], ProblemResponse] = lambda error: (problem_of(error), {}),
        **options: Any,
    ) -> None:
        super().__init__(
            title=title,
            description=description,
            version=__version__,
            docs_url=None,
            redoc_url=None,
            generate_unique_id_function=lambda route: route.name,
            **options,
        )

        async def refuse(_: Request, error: Exception) -> JSONResponse:
            return _problem_response(*refusal(error))

        async def fail(request: Request, error: Exception) -> JSONResponse:
            return _problem_response(bug(whose, request.method, request.url.path, error))

        for kind in refused:
            self.exception_handler(kind)(refuse)
        self.exception_handler(RequestValidationError)(_on_invalid_request)
        self.exception_handler(HTTPException)(_on_http_error)
        self.exception_handler(ClientDisconnect)(_on_disconnect)
        self.exception_handler(Exception)(fail)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; HEAD as GET, without the body."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            headless = _HeadRequest(receive, send)
            await super().__call__({**scope, "method": "GET"}, headless.receive, headless.send)
        else:
            await super().__call__(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        """Return FastAPI's OpenAPI document, made once, with the problem responses as they are."""
        if self.openapi_schema is None:
            _use_media_type(super().openapi())
        return super().openapi()


class _HeadRequest:
    """The two ends of a request whose answer's body nobody wants."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._streams = asyncio.Event()

    async def receive(self) -> Message:
        """Return what comes from the client; it has gone as soon as the body turns out to be a stream."""
        coming = asyncio.ensure_future(self._receive())
        streaming = asyncio.ensure_future(self._streams.wait())
        try:
            await asyncio.wait({coming, streaming}, return_when=asyncio.FIRST_COMPLETED)
            return {"type": "http.disconnect"} if streaming.done() else coming.result()
        finally:
            for task in (coming, streaming):
                task.cancel()

    async def send(self, message: Message) -> None:
        """Pass on the head, and that it is all."""
        if message["type"] != "http.response.body":
            await self._send(message)
        elif not self._streams.is_set():
            if message.get("more_body"):
                self._streams.set()
            await self._send({"type": "http.response.body", "body": b""})


def _use_media_type(openapi: dict[str, Any]) -> None:
    """Put the problem responses of an OpenAPI document under their media type, which FastAPI has no setting for."""
    content = {"schema": {"$ref": "#/components/schemas/Problem"}}
    operations = (operation for path in openapi["paths"].values() for operation in path.values())
    for response in (response for operation in operations for response in operation["responses"].values()):
        if content in response.get("content", {}).values():
            response["content"] = {PROBLEM_TYPE: content}


def _problem_response(document: Problem, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(document.body(), document.status, headers, PROBLEM_TYPE)


async def _on_invalid_request(_: Request, error: RequestValidationError) -> JSONResponse:
    found = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
    return _problem_response(problem(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid-request", "; ".join(found)))


async def _on_http_error(request: Request, error: HTTPException) -> JSONResponse:
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "-")
    detail = f"{request.method} {request.url.path}: {error.detail}; /openapi.json lists what there is"
    headers = error.headers
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers = {"Allow": ", ".join(sorted(_allowed_methods(request)))}  # the router's lists the first route's
    return _problem_response(problem(error.status_code, code, detail), headers)


def _allowed_methods(request: Request) -> set[str]:
    """Return the methods that a path has."""
    found = {
        method
        for method in _METHODS
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in request.app.routes)
    }
    return found | {"HEAD"} if "GET" in found else found


async def _on_disconnect(_: Request, __: ClientDisconnect) -> Response:
    return Response(status_code=HTTPStatus.BAD_REQUEST)  # nobody reads it; it only keeps the hang-up from being a bug
