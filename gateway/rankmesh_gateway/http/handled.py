"""Routes of the endpoints: for the OpenAPI document, and for what the small application forwards.

It forwards requests whose body is not JSON, whose query is invalid, and those by HEAD.
"""

from __future__ import annotations

from collections.abc import Iterable
from inspect import Parameter, Signature, isawaitable, signature
from typing import Annotated, Any, get_args, get_type_hints

import fastapi
from fastapi import FastAPI, Path, Query, Response, Security
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from starlette.types import Receive, Scope, Send

from rankmesh_agent.http.application import problem_responses
from rankmesh_gateway.http.endpoints import ENDPOINTS, Endpoint, job_of, reply_of
from rankmesh_gateway.http.replies import Reply, Request
from rankmesh_gateway.http.routes.events import EventStream

_BEARER = Security(HTTPBearer(auto_error=False, description="The job's token; a gateway on loopback may have none."))
"""Declares the token in the OpenAPI document; SecurityMiddleware checks it."""


class _Response(Response):
    """A handler's reply as a response."""

    def __init__(self, reply: Reply | EventStream) -> None:
        super().__init__()
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._reply.send(receive, send)


def add_handled_routes(app: FastAPI, endpoints: Iterable[Endpoint] = ENDPOINTS) -> None:
    """Add them to an application."""
    for each in endpoints:
        if each.handler is not None:
            kind = each.hints["return"]
            sends_itself = kind in (Reply, EventStream)
            app.add_api_route(
                each.path,
                _function(each),
                methods=[each.method],
                name=each.handler.__name__,
                status_code=each.status,
                response_model=None if sends_itself else kind,
                response_class=Response if sends_itself else JSONResponse,
                tags=[each.tag],
                dependencies=[_BEARER] if each.path.startswith(("/v1/", "/metrics")) else [],
                responses=problems(*each.problems) | each.document.get("responses", {}),
                openapi_extra={key: value for key, value in each.document.items() if key == "parameters"},
            )


def _function(endpoint: Endpoint) -> Any:
    """Return an endpoint as a function with the signature from which FastAPI knows its body or its parameters."""

    async def respond(request: fastapi.Request, **given: Any) -> Response:
        body = given.pop("body", None)
        ours = Request(request.scope, request.receive, job_of(request.scope))
        query = endpoint.query and endpoint.query(**given)
        reply = endpoint.respond(request.app.state.services, query, body, ours)
        if isawaitable(reply):
            reply = await reply
        return _Response(reply_of(endpoint, reply, ours))

    own = [Parameter("request", Parameter.KEYWORD_ONLY, annotation=fastapi.Request)]
    if endpoint.body is not None:
        default = None if endpoint.body_optional else Parameter.empty
        own.append(Parameter("body", Parameter.KEYWORD_ONLY, default=default, annotation=endpoint.hints["body"]))
    if endpoint.query is not None:
        kinds = get_type_hints(endpoint.query, include_extras=True)
        own += [
            each.replace(
                kind=Parameter.KEYWORD_ONLY,
                annotation=_parameter(kinds[each.name], f"{{{each.name}}}" in endpoint.path),
            )
            for each in signature(endpoint.query).parameters.values()
        ]
    respond.__doc__ = endpoint.handler.__doc__
    respond.__signature__ = Signature(own)  # type: ignore[attr-defined]
    return respond


def _parameter(kind: Any, in_path: bool) -> Any:
    """Return the type of a parameter, with msgspec's bounds as FastAPI's."""
    given = kind if hasattr(kind, "__metadata__") else get_args(kind)[0]
    (meta,) = given.__metadata__
    place = Path if in_path else Query
    bounds = place(ge=meta.ge, lt=meta.lt, le=meta.le, max_length=meta.max_length, description=meta.description)
    return Annotated[given.__origin__ if given is kind else given.__origin__ | None, bounds]


MEANINGS = {
    400: "The request is not HTTP, or its body cannot be read (`bad-request`).",
    401: "The job's token is missing or wrong.",
    403: "The credential has a lesser role than the request needs (`forbidden-role`), is that of another job "
    "(`forbidden-job`), or crossed a network in clear (`cleartext-token`); or the request comes from another site's "
    "page (`foreign-origin`) or another user's process (`other-user`).",
    404: "No standalone agent is registered (`no-agents`), no rank reports the group (`group-not-found`), no "
    "world of the job is complete (`job-not-found`), there is no such rank (`rank-not-found`), or the dashboard has "
    "no such part (`not-found`).",
    408: "The request's body did not come in time (`body-timeout`).",
    409: "Other processes hold the rank, or all ranks (`rank-taken`), the world size differs "
    "(`world-size-mismatch`), or another group has the name (`group-exists`).",
    410: "All ranks of the job have left, so that there is no world that could grow (`job-ended`).",
    413: "The request body is too large.",
    421: "The Host header is not a name of this gateway.",
    422: "The request is invalid (`invalid-request`).",
    429: "The client's address has sent too many requests without a right credential (`too-many-attempts`).",
    431: "The head of the request is over the limit of 64 KiB (`head-too-large`).",
    502: "A member's agent could not be reached or rejected the request, so no member has the group "
    "(`group-not-made`), or no agent fulfilled it (`no-agent-answered`).",
    503: "The gateway is about to end (`gateway-closing`), has reached its limit of jobs or agents "
    "(`gateway-full`), or no standalone agent is free (`no-free-agent`; ask again after `Retry-After` seconds). "
    "Ranks of the new group have failed or left (`rank-failed`). "
    "There are too many listeners to events (`too-many-listeners`). "
    "The gateway has no file descriptor to check the client's user (`descriptor-limit`).",
}

problems = problem_responses(MEANINGS)
"""Returns the ``responses=`` of a route with these error statuses."""
