"""Each thing a request may not be, beyond the bounds of its fields."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.gateway_requests import Requests

from rankmesh_agent.wire.fields import MAX_WORLD_SIZE
from rankmesh_agent.wire.schemas import Lease, LostRank
from rankmesh_gateway.state.validation import (
    InvalidRequestError,
    check_agent,
    check_heartbeat,
    check_join,
    check_lease,
)


def test_an_ordinary_request_passes(ask):
    check_join(ask.join(0))
    check_join(ask.join(MAX_WORLD_SIZE - 1, MAX_WORLD_SIZE))
    check_join(ask.join_unassigned(0))
    check_heartbeat(ask.heartbeat(1))
    check_agent(ask.agent(0))
    check_agent(ask.agent(0, leased_to="pid 7"))
    check_lease(ask.lease(0))
    check_lease(ask.lease())


WRONG = [
    # what is checked, the change, the error's text
    ("member", {"rank": 2}, "ranks go from 0 to 1"),
    ("heartbeat", {"member": Requests().member(-1)}, "rank -1"),
    ("heartbeat", {"lost": [LostRank(2, "")]}, "rank 2"),
    ("heartbeat", {"lost": [LostRank(0, "")] * 3}, "3 ranks are reported lost"),
    ("agent", {"leases": [Lease("l", "job", 1, 1, "")]}, "rank 1 is not in a world of 1"),
    ("lease", {"rank": 4}, "ranks go from 0 to 3"),
]


@pytest.mark.parametrize(("kind", "change", "text"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_invalid_requests(ask, kind, change, text):
    if kind == "member":
        kind, change = "join", {"member": replace(ask.member(0), **change)}
    check = {"join": check_join, "heartbeat": check_heartbeat, "agent": check_agent, "lease": check_lease}[kind]
    with pytest.raises(InvalidRequestError, match=text):
        check(replace(getattr(ask, kind)(0), **change))
