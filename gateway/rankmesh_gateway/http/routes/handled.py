"""Routes of the endpoints that have a handler: for the OpenAPI document, and for what the small application forwards.

It forwards requests whose body is not JSON, whose query is invalid, and those by HEAD.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from inspect import Parameter, Signature, isawaitable
from typing import Annotated, Any, get_args, get_type_hints

from fastapi import FastAPI, Query, Request, Response

from rankmesh_gateway.http.endpoints import ENDPOINTS, Endpoint, encode
from rankmesh_gateway.http.job_scope import job_of
from rankmesh_gateway.http.routes.dependencies import BEARER
from rankmesh_gateway.http.routes.problems import problems


def add_handled_routes(app: FastAPI) -> None:
    """Add them to an application."""
    for each in ENDPOINTS:
        if each.handler is not None:
            app.add_api_route(
                each.path,
                _function(each),
                methods=[each.method],
                name=each.handler.__name__,
                response_model=each.hints["return"],
                tags=[each.tag],
                dependencies=[BEARER] if each.path.startswith("/v1/") else [],
                responses=problems(*each.problems),
            )


def _function(endpoint: Endpoint) -> Any:
    """Return an endpoint as a function with the signature from which FastAPI knows its body or its parameters."""
    posted = endpoint.method == "POST"

    async def respond(request: Request, **given: Any) -> Response:
        kind = endpoint.kind
        body = given["body"] if posted else kind and kind(**given)
        reply = endpoint.respond(request.app.state.services, body, request.receive, job_of(request.scope))
        if isawaitable(reply):
            reply = await reply
        headers = {} if posted else {"cache-control": "no-store"}
        return Response(encode(reply), headers=headers, media_type="application/json")

    own = [Parameter("request", Parameter.KEYWORD_ONLY, annotation=Request)]
    if posted:
        own.append(Parameter("body", Parameter.KEYWORD_ONLY, annotation=endpoint.kind))
    elif endpoint.kind is not None:
        kinds = get_type_hints(endpoint.kind, include_extras=True)
        own += [
            Parameter(
                each.name,
                Parameter.KEYWORD_ONLY,
                default=() if each.default is MISSING else each.default,
                annotation=_parameter(kinds[each.name]),
            )
            for each in fields(endpoint.kind)
        ]
    respond.__doc__ = endpoint.handler.__doc__
    respond.__signature__ = Signature(own)  # type: ignore[attr-defined]
    return respond


def _parameter(kind: Any) -> Any:
    """Return the type of a query's field, with msgspec's bounds as FastAPI's."""
    given = kind if hasattr(kind, "__metadata__") else get_args(kind)[0]
    (meta,) = given.__metadata__
    query = Query(ge=meta.ge, le=meta.le, max_length=meta.max_length, description=meta.description)
    return Annotated[given.__origin__ if given is kind else given.__origin__ | None, query]
