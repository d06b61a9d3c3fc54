"""How errors leave the agent: as ``application/problem+json`` (RFC 9457), in answers and in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from rankmesh_agent.wire.errors import DistError
from rankmesh_agent.wire.guard import problem, problem_of
from rankmesh_agent.wire.schemas import Problem

MEDIA_TYPE = "application/problem+json"

_MEANING = {
    400: "The request body cannot be read (`bad-request`).",
    401: "The job's token is missing or wrong.",
    403: "The request comes from another site's page.",
    404: "There is no such key (`key-not-found`) or group (`group-not-found`), or the queue is empty (`queue-empty`).",
    408: "Some keys were not set in time (`store-timeout`); the detail names them.",
    409: "The value cannot be added to (`not-a-number`).",
    412: "The key does not hold what the request's conditions say (`precondition-failed`).",
    413: "The request body is too large.",
    421: "The Host header is not a name of this agent.",
    422: "The request is not understood (`invalid-request`), a key is empty or too long (`invalid-key`), a value is "
    "too large or not base64 (`invalid-value`), or its Idempotency-Key is another's (`idempotency-key-reused`).",
    502: "The agent that owns the store cannot be reached (`network-error`).",
    503: "The rank does not take part in its job (`not-ready`).",
}


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the ``responses=`` of a route that may answer with these error statuses."""
    return {status: {"model": Problem, "description": _MEANING[status]} for status in statuses}


def use_media_type(openapi: dict[str, Any]) -> None:
    """Put the problem responses of an OpenAPI document under their media type, which FastAPI has no setting for."""
    content = {"schema": {"$ref": "#/components/schemas/Problem"}}
    operations = (operation for path in openapi["paths"].values() for operation in path.values())
    for response in (response for operation in operations for response in operation["responses"].values()):
        if content in response.get("content", {}).values():
            response["content"] = {MEDIA_TYPE: content}


def install(app: FastAPI) -> None:
    """Make every error of the application a problem document."""
    app.exception_handler(DistError)(_dist_error)
    app.exception_handler(RequestValidationError)(_invalid)
    app.exception_handler(HTTPException)(_http_error)
    app.exception_handler(ClientDisconnect)(_hung_up)
    app.exception_handler(Exception)(_bug)


def _answer(document: Problem, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(document.body(), document.status, headers, MEDIA_TYPE)


async def _dist_error(_: Request, error: DistError) -> JSONResponse:
    return _answer(problem_of(error))


async def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
    found = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
    return _answer(problem(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid-request", "; ".join(found)))


async def _http_error(request: Request, error: HTTPException) -> JSONResponse:
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "-")
    detail = f"{request.method} {request.url.path}: {error.detail}; /openapi.json lists what there is"
    return _answer(problem(error.status_code, code, detail), error.headers)


async def _hung_up(_: Request, __: ClientDisconnect) -> Response:
    return Response(status_code=HTTPStatus.BAD_REQUEST)  # nobody reads it; it only keeps the hang-up from being a bug


async def _bug(request: Request, error: Exception) -> JSONResponse:
    detail = f"{request.method} {request.url.path} failed with {type(error).__name__}; the agent's log says where"
    return _answer(problem(HTTPStatus.INTERNAL_SERVER_ERROR, "internal-error", detail))
