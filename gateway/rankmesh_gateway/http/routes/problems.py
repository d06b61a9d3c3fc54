"""What the gateway's error statuses mean, for the OpenAPI document."""

from __future__ import annotations

from rankmesh_agent.http.application import problem_responses

MEANINGS = {
    400: "The request body cannot be read (`bad-request`).",
    401: "The job's token is missing or wrong.",
    403: "The request comes from another site's page.",
    404: "No standalone agent is registered (`no-agents`), no such group is reported (`group-not-found`), or no "
    "world of the job has come together (`job-not-found`).",
    409: "Others hold the rank, or all ranks (`rank-taken`), the world size differs (`world-size-mismatch`), or "
    "another group has the name (`group-exists`).",
    413: "The request body is too large.",
    421: "The Host header is not a name of this gateway.",
    422: "The request is not understood (`invalid-request`).",
    502: "A member's agent could not be reached or refused, so no member has the group (`group-not-made`), or none of "
    "them did as it was asked (`no-agent-answered`).",
    503: "The gateway is about to end (`gateway-closing`), keeps as many jobs or agents as it may (`gateway-full`), or "
    "no standalone agent is free (`no-free-agent`; ask again after `Retry-After` seconds). Ranks that are to be in a "
    "group have failed or left (`rank-failed`). As many listen to events as may (`too-many-listeners`).",
}

problems = problem_responses(MEANINGS)
"""Returns the ``responses=`` of a route that may answer with these error statuses."""
