"""The gateway's endpoints: the role that each needs, where its request names its job, and the handler.

The small application (``asgi``), the web framework's (``routes.handled``) and the checks of credentials read this
table. An endpoint that is not in it needs the role ``run``, and rejects the credential of a job.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, get_type_hints

from rankmesh_agent.http.middleware import Receive
from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.credentials import Role
from rankmesh_agent.wire.schemas import HeartbeatReply
from rankmesh_gateway.http import handlers


@dataclass(frozen=True)
class Endpoint:
    """An endpoint.

    Attributes:
        method, path: ``{name}`` in the path stands for any text without a slash.
        role: the least role of a credential that may use it.
        job: where it names its job: in its query, or in its body, as ``job``; ``none`` if it has no job's data; empty
            if it is not for the credential of one job.
        handler: see ``handlers``; None if it needs the framework, and so is one of ``routes``.
        tag: its chapter in the OpenAPI document.
        problems: the statuses of its errors, besides those of any request.
    """

    method: str
    path: str
    role: Role
    job: Literal["query", "body", "none", ""] = ""
    handler: Callable[..., Any] | None = None
    tag: str = ""
    problems: tuple[int, ...] = (422, 503)

    @cached_property
    def hints(self) -> dict[str, Any]:
        """The types of the handler's arguments and of its reply."""
        return get_type_hints(self.handler)

    @cached_property
    def kind(self) -> Any:
        """The type of the request's body, or of its query; None without either."""
        return self.hints.get("body") or self.hints.get("query")

    def respond(self, services: handlers.Services, body: object, receive: Receive, job: str | None = None) -> Any:
        """Return the handler's reply, or an awaitable of it; see ``handlers``."""
        assert self.handler is not None
        return self.handler(*(services, body, receive, job)[: self.handler.__code__.co_argcount])


_MEMBERSHIP, _AGENTS, _GROUPS, _EVENTS, _DIAGNOSIS = "membership", "agents", "groups", "events", "diagnosis"

ENDPOINTS = (
    Endpoint("GET", "/health", Role.READ, "", handlers.health, "health", ()),
    Endpoint("GET", "/livez", Role.READ, "", handlers.livez, "health", (503,)),
    Endpoint("GET", "/readyz", Role.READ, "", handlers.readyz, "health", (503,)),
    Endpoint("GET", "/metrics", Role.READ, "query"),
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
    Endpoint("POST", "/v1/groups", Role.RUN, "body"),
    Endpoint("GET", "/v1/groups/{group}", Role.READ, "query"),
    Endpoint("GET", "/v1/groups/{group}/inflight", Role.READ, "query"),
    Endpoint("POST", "/v1/groups/{group}/abort", Role.RUN, "query"),
    Endpoint("POST", "/v1/groups/{group}/shrink", Role.RUN, "query"),
    Endpoint("POST", "/v1/groups/{group}/grow", Role.RUN, "query"),
    Endpoint("GET", "/v1/diagnosis", Role.READ, "query", handlers.diagnosis, _DIAGNOSIS),
    Endpoint("GET", "/v1/ranks/snapshots", Role.RUN, "query", handlers.rank_snapshots, _DIAGNOSIS),
    Endpoint("GET", "/v1/ranks/{rank}/snapshot", Role.RUN, "query"),
    Endpoint("GET", "/v1/events", Role.READ, "query"),
    Endpoint("GET", "/v1/rates", Role.READ, "query", handlers.rates, _EVENTS),
    Endpoint("GET", "/v1/overview", Role.READ, "query", handlers.overview, _EVENTS),
    Endpoint("POST", "/v1/dashboard/codes", Role.READ, "none"),
    Endpoint("POST", "/v1/dashboard/sessions", Role.READ, "none"),
    Endpoint("DELETE", "/v1/dashboard/sessions", Role.READ, "none"),
)
_BY_PATH = {(each.method, each.path): each for each in ENDPOINTS}
_PATTERNS = [(re.compile(re.sub(r"\{\w+\}", "[^/]+", each.path)), each) for each in ENDPOINTS if "{" in each.path]


@lru_cache
def endpoint_of(method: str, path: str) -> Endpoint | None:
    """Return the endpoint of a request, None for those that are not in the table; HEAD is GET."""
    method = "GET" if method == "HEAD" else method
    matching = (each for pattern, each in _PATTERNS if each.method == method and pattern.fullmatch(path))
    return _BY_PATH.get((method, path)) or next(matching, None)


def role_of(method: str, path: str) -> Role:
    """Return the role that a request needs."""
    endpoint = endpoint_of(method, path)
    return Role.RUN if endpoint is None else endpoint.role


def encode(reply: object) -> bytes:
    """Return a handler's reply as JSON; that to a heartbeat without the fields that have their defaults."""
    if isinstance(reply, HeartbeatReply):
        fields = vars(reply).items()
        reply = {name: value for name, value in fields if name == "failed" or value != _DEFAULT_REPLY.get(name)}
    return json_text.encode(reply)


_DEFAULT_REPLY = vars(HeartbeatReply([]))
