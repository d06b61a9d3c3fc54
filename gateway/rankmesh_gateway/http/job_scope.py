"""Restriction of a request to the job of its credential: where each endpoint names its job. Without a framework.

An endpoint that is not listed rejects the credential of a job.
"""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlencode

from rankmesh_agent.http.middleware import Message, reject_job
from rankmesh_agent.wire.credentials import Grant

_QUERY = re.compile(
    r"GET /(metrics|v1/(jobs|ranks(/[^/]+/snapshot|/snapshots)?|agents|groups(/[^/]+(/inflight)?)?"
    r"|waiting|snapshot|events|overview|rates|diagnosis))"
    r"|POST /v1/groups/[^/]+/(abort|shrink|grow)"
)
"""Endpoints with the job as the parameter \"job\" of their query; they respond with its part of the registry."""
_BODY = re.compile(r"POST /v1/(join|heartbeat|leave|members|ended|launchers|leases|groups)")
"""Endpoints with the job as the field \"job\" of their JSON body."""
_NO_JOB = re.compile(r"GET /openapi\.json|POST /v1/dashboard/(codes|sessions)")
"""Endpoints without a job's data; a code and a session of the dashboard have the job of the credential."""
_BODY_JOB = "body_job"


def confine(scope: Message, grant: Grant) -> None:
    """Restrict a request to the job of its credential, see SecurityMiddleware.

    Raises:
        ForbiddenJobError: it is for another job, for all jobs, or for none; or the credential is that of a lease.
    """
    request = f"{'GET' if scope['method'] == 'HEAD' else scope['method']} {scope['path']}"
    job = grant.job or ""
    if grant.lease:
        reject_job(scope, grant)
    elif _QUERY.fullmatch(request):
        fields = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        for name, value in fields:
            if name == "job":
                grant.require(value)
        scope["query_string"] = urlencode([each for each in fields if each[0] != "job"] + [("job", job)]).encode()
    elif _BODY.fullmatch(request):
        scope["state"][_BODY_JOB] = grant
    elif not _NO_JOB.fullmatch(request):
        reject_job(scope, grant)


def check_body(scope: Message, named: object) -> str | None:
    """Check that the job that a request's body names is that of its credential.

    Args:
        scope: of the request.
        named: the body's field ``job``.

    Returns:
        The job that the request is restricted to; None for all.

    Raises:
        ForbiddenJobError: it is another.
    """
    grant: Grant | None = scope.get("state", {}).get(_BODY_JOB)
    if grant is None:
        return None
    grant.require(named if isinstance(named, str) else "")
    return grant.job
