"""What the agent's error statuses mean, for the OpenAPI document."""

from __future__ import annotations

from rankmesh_agent.web import documenting

MEANINGS = {
    400: "The request body cannot be read (`bad-request`).",
    401: "The job's token is missing or wrong.",
    403: "The request comes from another site's page, or the gateway does not list the address that it is about "
    "(`address-not-listed`).",
    404: "There is no such key (`key-not-found`) or group (`group-not-found`), or the queue is empty (`queue-empty`).",
    408: "Some keys were not set in time (`store-timeout`); the detail names them.",
    409: "The value cannot be added to (`not-a-number`), the agent is taken (`agent-taken`), or the gateway refuses: "
    "the rank is another's (`rank-taken`), the world size another (`world-size-mismatch`).",
    410: "The lease has ended (`lease-ended`).",
    412: "The key does not hold what the request's conditions say (`precondition-failed`).",
    413: "The request body is too large.",
    421: "The Host header is not a name of this agent.",
    422: "The request is not understood (`invalid-request`), a key is empty or too long (`invalid-key`), a value is "
    "too large or not base64 (`invalid-value`), or its Idempotency-Key is another's (`idempotency-key-reused`).",
    502: "The agent that owns the store, or the gateway, cannot be reached (`network-error`).",
    503: "The rank does not take part in its job (`not-ready`), the agent is in none (`not-leased`), or as many probes "
    "are under way as there may be (`probe-busy`).",
    504: "The job's other ranks did not come in time (`join-timeout`), or no gateway answers (`gateway-unreachable`).",
}

documented = documenting(MEANINGS)
"""Returns the ``responses=`` of a route that may answer with these error statuses."""
