"""Meanings of the agent's error statuses, for the OpenAPI document."""

from __future__ import annotations

from rankmesh_agent.http.application import problem_responses

MEANINGS = {
    400: "The request is not HTTP, or its body cannot be read (`bad-request`), or the body is not the array that the "
    "request describes (`invalid-tensor`).",
    401: "The job's token is missing or wrong.",
    403: "The credential has a lesser role than the request needs (`forbidden-role`), is that of another job or lease "
    "(`forbidden-job`), or crossed a network in clear (`cleartext-token`). The request comes from another site's page "
    "(`foreign-origin`) or another user's process (`other-user`), or the gateway does not list the address that it is "
    "about (`address-not-listed`).",
    404: "There is no such key (`key-not-found`) or group (`group-not-found`), or the queue is empty (`queue-empty`).",
    408: "Some keys were not set in time (`store-timeout`), the detail names them; or the request's "
    "body did not come in time (`body-timeout`).",
    409: "The value cannot be added to (`not-a-number`), the agent is taken (`agent-taken`), or the gateway refuses: "
    "another process holds the rank (`rank-taken`), or the world size differs (`world-size-mismatch`). "
    "The ranks did not make the same call (`collective-mismatch`), the message is not what its receive expects "
    "(`message-mismatch`): no data has moved, the group goes on. A group has that name (`group-exists`), or is the "
    "job's (`group-in-use`).",
    410: "The lease has ended (`lease-ended`), or the group (`group-aborted`).",
    412: "The key does not hold what the request's conditions say (`precondition-failed`).",
    413: "The request body is too large (`body-too-large`), or the array to be received is; or the store has as many "
    "keys or bytes as it may (`store-full`), the detail names the setting.",
    415: "The body is of a media type that holds no array (`unsupported-media-type`).",
    421: "The Host header is not a name of this agent; or another agent has forwarded the request, and this one does "
    "not own the store any more (`store-moved`).",
    422: "The request is invalid (`invalid-request`), a key is empty or too long (`invalid-key`), a value is "
    "too large or not base64 (`invalid-value`), its Idempotency-Key belongs to another request "
    "(`idempotency-key-reused`), or a call's arguments are invalid (`invalid-call`).",
    429: "The client's address has sent too many requests without a right credential (`too-many-attempts`).",
    431: "The head of the request is over the limit of 64 KiB (`head-too-large`).",
    500: "A registered backend failed (`backend-error`), or the agent did (`internal-error`): its log says where.",
    502: "The agent that owns the store, or the gateway, cannot be reached (`network-error`), or the agent does not "
    "respond within 20 s (`store-unresponsive`): its process is stopped, or is busy; `ranks` names it.",
    503: "The rank does not take part in its job (`not-ready`), the agent is in none (`not-leased`), or too many "
    "probes are under way (`probe-busy`). A rank died or left (`rank-failed`), `ranks` names it; or too many calls "
    "wait (`too-many-calls`). The agent has no file descriptor to check the client's user (`descriptor-limit`).",
    504: "Ranks did not come to a call in time (`collective-timeout`), `missing_ranks` names them. The job's other "
    "ranks did not come in time (`join-timeout`), or no gateway answers (`gateway-unreachable`).",
}

problems = problem_responses(MEANINGS)
