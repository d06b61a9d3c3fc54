"""How errors leave the gateway: as ``application/problem+json`` (RFC 9457), in answers and in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from rankmesh_agent.wire.errors import DistError
from rankmesh_agent.wire.guard import problem
from rankmesh_agent.wire.schemas import Problem
from rankmesh_gateway import answers
from rankmesh_gateway.checks import InvalidRequestError

MEDIA_TYPE = "application/problem+json"

_MEANING = {
    400: "The request body cannot be read (`bad-request`).",
    401: "The job's token is missing or wrong.",
    403: "The request comes from another site's page.",
    409: "Others hold the rank, or all ranks (`rank-taken`), or the world size differs (`world-size-mismatch`).",
    413: "The request body is too large.",
    421: "The Host header is not a name of this gateway.",
    422: "The request is not understood (`invalid-request`).",
    503: "The gateway is about to end (`gateway-closing`), or keeps as many jobs as it may (`gateway-full`).",
}


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the ``responses=`` of a route that may answer with these error statuses."""
    return {status: {"model": Problem, "description": _MEANING[status]} for status in statuses}


def use_media_type(openapi: dict[str, Any]) -> None:
    """Put the problem responses of an OpenAPI document under their media type, which FastAPI has no setting for."""
    operations = (operation for path in openapi["paths"].values() for operation in path.values())
    for operation in operations:
        for status, response in operation["responses"].items():
            if int(status) >= HTTPStatus.BAD_REQUEST:
                response["content"] = {MEDIA_TYPE: response["content"]["application/json"]}


def install(app: FastAPI) -> None:
    """Make every error of the application a problem document."""
    app.exception_handler(DistError)(_refusal)
    app.exception_handler(InvalidRequestError)(_refusal)
    app.exception_handler(RequestValidationError)(_wrong_types)
    app.exception_handler(HTTPException)(_http_error)
    app.exception_handler(Exception)(_bug)


def _answer(document: Problem, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(document.body(), document.status, headers, MEDIA_TYPE)


async def _refusal(_: Request, error: DistError | InvalidRequestError) -> JSONResponse:
    return _answer(*answers.refusal(error))


async def _wrong_types(_: Request, error: RequestValidationError) -> JSONResponse:
    found = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
    return _answer(problem(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid-request", "; ".join(found)))


async def _http_error(request: Request, error: HTTPException) -> JSONResponse:
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "-")
    detail = f"{request.method} {request.url.path}: {error.detail}; /openapi.json lists what there is"
    return _answer(problem(error.status_code, code, detail), error.headers)


async def _bug(request: Request, error: Exception) -> JSONResponse:
    return _answer(answers.bug(request.method, request.url.path, error))
