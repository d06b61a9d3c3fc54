"""The gateway's endpoints: the role that each needs, where its request names its job, and the handler; and the checks
of a request's job against that of its credential.

The small application (``asgi``), the web framework's (``handled``) and the checks of credentials read this
table. An endpoint that is not in it needs the role ``run``, and rejects the credential of a job.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from http import HTTPStatus
from types import NoneType
from typing import Any, Literal, get_args, get_type_hints
from urllib.parse import parse_qsl, urlencode

from rankmesh_agent.http.middleware import Message, reject_job
from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.credentials import Grant, Role
from rankmesh_agent.wire.json_text import InvalidBodyError
from rankmesh_agent.wire.schemas import HeartbeatReply
from rankmesh_gateway.dashboard import PREFIX
from rankmesh_gateway.http import handlers
from rankmesh_gateway.http.dashboard_sessions import CODES_PATH, EXCHANGE_PATH
from rankmesh_gateway.http.replies import Reply, Request
from rankmesh_gateway.http.routes import dashboard, events, groups, metrics
from rankmesh_gateway.http.routes.events import EventStream


@dataclass(frozen=True)
class Endpoint:
    """An endpoint.

    Attributes:
        method, path: ``{name}`` in the path stands for any text without a slash.
        role: the least role of a credential that may use it.
        job: where it names its job: in its query, or in its body, as ``job``; ``none`` if it has no job's data; empty
            if it is not for the credential of one job.
        handler: see ``handlers``; None if the framework has it.
        tag: its chapter in the OpenAPI document.
        problems: the statuses of its errors, besides those of any request.
        status: that of its reply.
        document: its parameters and responses in the OpenAPI document that the handler's types do not say.
    """

    method: str
    path: str
    role: Role
    job: Literal["query", "body", "none", ""] = ""
    handler: Callable[..., Any] | None = None
    tag: str = ""
    problems: tuple[int, ...] = (422, 503)
    status: int = HTTPStatus.OK
    document: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def hints(self) -> dict[str, Any]:
        """The types of the handler's arguments and of its reply."""
        return get_type_hints(self.handler) if self.handler is not None else {}

    @cached_property
    def query(self) -> Any:
        """The type of the parameters in its path and query; None without any."""
        return self.hints.get("query")

    @cached_property
    def body(self) -> Any:
        """The type of the request's body; None without one."""
        kind = self.hints.get("body")
        return get_args(kind)[0] if self.body_optional else kind

    @cached_property
    def body_optional(self) -> bool:
        """Whether a request may have no body."""
        return NoneType in get_args(self.hints.get("body"))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the handler's arguments, but for the first one, the services."""
        assert self.handler is not None
        return self.handler.__code__.co_varnames[1 : self.handler.__code__.co_argcount]

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches the endpoint's paths."""
        return re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", self.path))

    def respond(self, services: handlers.Services, query: object, body: object, request: Request) -> Any:
        """Return the handler's reply, or an awaitable of it; see ``handlers``."""
        assert self.handler is not None
        given = {"query": query, "body": body, "request": request}
        return self.handler(services, *map(given.__getitem__, self.names))


_MEMBERSHIP, _AGENTS, _GROUPS, _EVENTS, _DIAGNOSIS = "membership", "agents", "groups", "events", "diagnosis"
_DASHBOARD = "dashboard"
_MADE = HTTPStatus.CREATED
_OF_GROUP, _CHANGES = (404, 422, 503), (404, 409, 422, 502, 503)

ENDPOINTS = (
    Endpoint("GET", "/health", Role.READ, "", handlers.health, "health", ()),
    Endpoint("GET", "/livez", Role.READ, "", handlers.livez, "health", (503,)),
    Endpoint("GET", "/readyz", Role.READ, "", handlers.readyz, "health", (503,)),
    Endpoint("GET", "/metrics", Role.READ, "query", metrics.metrics, "metrics", document=metrics.DOCUMENT),
    Endpoint("GET", "/openapi.json", Role.READ, "none"),
    Endpoint("POST", "/v1/join", Role.RUN, "body", handlers.join, _MEMBERSHIP, (409, 410, 422, 503)),
    Endpoint("POST", "/v1/heartbeat", Role.RUN, "body", handlers.heartbeat, _MEMBERSHIP, (409, 422, 503)),
    Endpoint("POST", "/v1/leave", Role.RUN, "body", handlers.leave, _MEMBERSHIP),
    Endpoint("POST", "/v1/members", Role.RUN, "body", handlers.members, _MEMBERSHIP),
    Endpoint("POST", "/v1/ended", Role.RUN, "body", handlers.ended, _MEMBERSHIP),
    Endpoint("POST", "/v1/launchers", Role.RUN, "body", handlers.launchers, _MEMBERSHIP, (409, 422, 503)),
    Endpoint("GET", "/v1/waiting", Role.READ, "query", handlers.waiting, _MEMBERSHIP),
    Endpoint("GET", "/v1/snapshot", Role.READ, "query", handlers.snapshot, _MEMBERSHIP),
    Endpoint("GET", "/v1/ranks", Role.READ, "query", handlers.ranks, _MEMBERSHIP),
    Endpoint("POST", "/v1/agents", Role.RUN, "", handlers.agent_beat, _AGENTS),
    Endpoint("POST", "/v1/agents/leave", Role.RUN, "", handlers.agent_leave, _AGENTS),
    Endpoint("GET", "/v1/agents", Role.READ, "query", handlers.agents, _AGENTS),
    Endpoint("POST", "/v1/leases", Role.RUN, "body", handlers.lease, _AGENTS, (404, 422, 503)),
    Endpoint("GET", "/v1/jobs", Role.READ, "query", handlers.jobs, _GROUPS),
    Endpoint("GET", "/v1/groups", Role.READ, "query", handlers.groups, _GROUPS),
    Endpoint("POST", "/v1/groups", Role.RUN, "body", groups.make_group, _GROUPS, _CHANGES, _MADE),
    Endpoint("GET", "/v1/groups/{group}", Role.READ, "query", groups.group, _GROUPS, _OF_GROUP),
    Endpoint("GET", "/v1/groups/{group}/inflight", Role.READ, "query", groups.group_in_flight, _GROUPS, _OF_GROUP),
    Endpoint("POST", "/v1/groups/{group}/abort", Role.RUN, "query", groups.abort_group, _GROUPS, (*_OF_GROUP, 502)),
    Endpoint("POST", "/v1/groups/{group}/shrink", Role.RUN, "query", groups.shrink_group, _GROUPS, _CHANGES),
    Endpoint("POST", "/v1/groups/{group}/grow", Role.RUN, "query", groups.grow_group, _GROUPS, _CHANGES),
    Endpoint("GET", "/v1/diagnosis", Role.READ, "query", handlers.diagnosis, _DIAGNOSIS),
    Endpoint("GET", "/v1/stragglers", Role.READ, "query", handlers.stragglers, _DIAGNOSIS),
    Endpoint("GET", "/v1/timelines", Role.READ, "query", handlers.timelines, _DIAGNOSIS),
    Endpoint("GET", "/v1/ranks/snapshots", Role.RUN, "query", handlers.rank_snapshots, _DIAGNOSIS),
    Endpoint("GET", "/v1/ranks/{rank}/snapshot", Role.RUN, "query", handlers.rank_snapshot, _DIAGNOSIS, _OF_GROUP),
    Endpoint("GET", "/v1/events", Role.READ, "query", events.events, _EVENTS, document=events.DOCUMENT),
    Endpoint("GET", "/v1/rates", Role.READ, "query", handlers.rates, _EVENTS),
    Endpoint("GET", "/v1/overview", Role.READ, "query", handlers.overview, _EVENTS),
    Endpoint("GET", "/", Role.RUN, "", dashboard.page, _DASHBOARD, (503,), document=dashboard.PAGE),
    Endpoint("GET", PREFIX + "{name}", Role.RUN, "", dashboard.part, _DASHBOARD, (404, 503), document=dashboard.PART),
    Endpoint("POST", CODES_PATH, Role.READ, "none", dashboard.create_code, _DASHBOARD, (401, 503), _MADE),
    Endpoint("POST", EXCHANGE_PATH, Role.READ, "none", dashboard.create_session, _DASHBOARD, (401, 503), _MADE),
    Endpoint("DELETE", EXCHANGE_PATH, Role.READ, "none", dashboard.end_session, _DASHBOARD, (401, 503)),
)
_BY_PATH = {(each.method, each.path): each for each in ENDPOINTS}
_PATTERNED = [each for each in ENDPOINTS if "{" in each.path]


@lru_cache
def endpoint_of(method: str, path: str) -> Endpoint | None:
    """Return the endpoint of a request, None for those that are not in the table; HEAD is GET."""
    method = "GET" if method == "HEAD" else method
    matching = (each for each in _PATTERNED if each.method == method and each.pattern.fullmatch(path))
    return _BY_PATH.get((method, path)) or next(matching, None)


def role_of(method: str, path: str) -> Role:
    """Return the role that a request needs."""
    endpoint = endpoint_of(method, path)
    return Role.RUN if endpoint is None else endpoint.role


def reply_of(endpoint: Endpoint, reply: Any, request: Request) -> Reply | EventStream:
    """Return what a handler has returned as a reply; that to a heartbeat without fields that have their defaults."""
    if isinstance(reply, Reply | EventStream):
        return reply
    if isinstance(reply, HeartbeatReply):
        fields = vars(reply).items()
        reply = {name: value for name, value in fields if name == "failed" or value != _DEFAULT_REPLY.get(name)}
    headers = {"content-type": "application/json", **request.headers}
    if endpoint.method == "GET":
        headers["cache-control"] = "no-store"
    return Reply(json_text.encode(reply), headers, endpoint.status)


_DEFAULT_REPLY = vars(HeartbeatReply([]))


_BODY_JOB = "body_job"


@dataclass
class _JobOfBody:
    job: str


def confine(scope: Message, grant: Grant) -> None:
    """Restrict a request to the job of its credential, see SecurityMiddleware."""
    endpoint, job = endpoint_of(scope["method"], scope["path"]), grant.job or ""
    if grant.lease or endpoint is None or not endpoint.job:
        reject_job(scope, grant)
    elif endpoint.job == "query":
        fields = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        for name, value in fields:
            if name == "job":
                grant.require(value)
        scope["query_string"] = urlencode([each for each in fields if each[0] != "job"] + [("job", job)]).encode()
    elif endpoint.job == "body":
        scope["state"][_BODY_JOB] = grant


def check_body(scope: Message, content: bytes) -> str | None:
    """Check that the job that a request's body names is that of its credential; return it, None for all jobs."""
    grant: Grant | None = scope.get("state", {}).get(_BODY_JOB)
    if grant is None:
        return None
    try:
        named = json_text.read(_JobOfBody, content).job
    except (InvalidBodyError, ValueError):
        named = ""
    grant.require(named)
    return grant.job


def job_of(scope: Message) -> str | None:
    """Return the job that a request with a body is restricted to; None for all."""
    grant: Grant | None = scope.get("state", {}).get(_BODY_JOB)
    return None if grant is None else grant.job
