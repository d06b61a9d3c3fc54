"""A web application whose errors are ``application/problem+json`` (RFC 9457), in answers and in the OpenAPI document.

The agent's and the gateway's are made of this. What an error's status means there is theirs: ``routes/problems.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from rankmesh_agent.wire.errors import DistError
from rankmesh_agent.wire.guard import PROBLEM_TYPE, bug, problem, problem_of
from rankmesh_agent.wire.schemas import Problem
from rankmesh_agent.wire.version import __version__

Refusal = tuple[Problem, Mapping[str, str]]
"""The problem document that a request is refused with, and the headers that go with it."""

Responses = dict[int | str, dict[str, Any]]
"""What FastAPI takes as ``responses=``."""


def documenting(meanings: Mapping[int, str]) -> Callable[..., Responses]:
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
        refusal: Callable[[Any], Refusal] = lambda error: (problem_of(error), {}),
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
            return _answer(*refusal(error))

        async def fail(request: Request, error: Exception) -> JSONResponse:
            return _answer(bug(whose, request.method, request.url.path, error))

        for kind in refused:
            self.exception_handler(kind)(refuse)
        self.exception_handler(RequestValidationError)(_invalid)
        self.exception_handler(HTTPException)(_http_error)
        self.exception_handler(ClientDisconnect)(_hung_up)
        self.exception_handler(Exception)(fail)

    def openapi(self) -> dict[str, Any]:
        """Return FastAPI's OpenAPI document, made once, with the problem responses as they are."""
        if self.openapi_schema is None:
            _use_media_type(super().openapi())
        return super().openapi()


def _use_media_type(openapi: dict[str, Any]) -> None:
    """Put the problem responses of an OpenAPI document under their media type, which FastAPI has no setting for."""
    content = {"schema": {"$ref": "#/components/schemas/Problem"}}
    operations = (operation for path in openapi["paths"].values() for operation in path.values())
    for response in (response for operation in operations for response in operation["responses"].values()):
        if content in response.get("content", {}).values():
            response["content"] = {PROBLEM_TYPE: content}


def _answer(document: Problem, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(document.body(), document.status, headers, PROBLEM_TYPE)


async def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
    found = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
    return _answer(problem(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid-request", "; ".join(found)))


async def _http_error(request: Request, error: HTTPException) -> JSONResponse:
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "-")
    detail = f"{request.method} {request.url.path}: {error.detail}; /openapi.json lists what there is"
    return _answer(problem(error.status_code, code, detail), error.headers)


async def _hung_up(_: Request, __: ClientDisconnect) -> Response:
    return Response(status_code=HTTPStatus.BAD_REQUEST)  # nobody reads it; it only keeps the hang-up from being a bug
