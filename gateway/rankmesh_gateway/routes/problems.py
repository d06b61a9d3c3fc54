"""What the gateway's error statuses mean, for the OpenAPI document."""

from __future__ import annotations

from rankmesh_agent.web import documenting

MEANINGS = {
    400: "The request body cannot be read (`bad-request`).",
    401: "The job's token is missing or wrong.",
    403: "The request comes from another site's page.",
    404: "No standalone agent is registered (`no-agents`).",
    409: "Others hold the rank, or all ranks (`rank-taken`), or the world size differs (`world-size-mismatch`).",
    413: "The request body is too large.",
    421: "The Host header is not a name of this gateway.",
    422: "The request is not understood (`invalid-request`).",
    503: "The gateway is about to end (`gateway-closing`), keeps as many jobs or agents as it may (`gateway-full`), or "
    "no standalone agent is free (`no-free-agent`; ask again after `Retry-After` seconds).",
}

documented = documenting(MEANINGS)
"""Returns the ``responses=`` of a route that may answer with these error statuses."""
