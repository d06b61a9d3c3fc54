"""Meanings of the gateway's error statuses, for the OpenAPI document."""

from __future__ import annotations

from rankmesh_agent.http.application import problem_responses

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
