"""Restriction of a request to the job of its credential."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode

from rankmesh_agent.http.middleware import Message, reject_job
from rankmesh_agent.wire import json_text
from rankmesh_agent.wire.credentials import Grant
from rankmesh_agent.wire.json_text import InvalidBodyError
from rankmesh_gateway.http.endpoints import endpoint_of

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
