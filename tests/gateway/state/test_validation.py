"""Each thing a request may not be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.gateway_requests import Requests

from rankmesh_agent.wire.schemas import Lease
from rankmesh_gateway.state.validation import (
    MAX_ADDRESSES,
    MAX_LEASES,
    MAX_NAME,
    MAX_REASON,
    MAX_WORLD_SIZE,
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
    check_join(ask.join(0, job="j" * MAX_NAME))
    check_heartbeat(ask.heartbeat(1))
    check_agent(ask.agent(0))
    check_agent(ask.agent(0, leased_to="pid 7"))
    check_lease(ask.lease(0))
    check_lease(ask.lease())


WRONG = [
    # what is checked, the change, the error's text
    ("join", {"job": " "}, "job is empty"),
    ("join", {"job": "j" * (MAX_NAME + 1)}, "job has 256 characters"),
    ("join", {"world_size": 0}, "world size 0"),
    ("join", {"world_size": MAX_WORLD_SIZE + 1}, "world size 65537"),
    ("member", {"rank": 2}, "ranks go from 0 to 1"),
    ("member", {"rank": -2}, "rank -2"),
    ("member", {"instance": ""}, "member.instance is empty"),
    ("member", {"http": "h" * (MAX_NAME + 1)}, "member.http has 256"),
    ("member", {"transport": "t" * (MAX_NAME + 1)}, "member.transport has 256"),
    ("member", {"addresses": ["a" * (MAX_NAME + 1)]}, r"member.addresses\[0\]"),
    ("member", {"addresses": ["a:1"] * (MAX_ADDRESSES + 1)}, "65 addresses"),
    ("heartbeat", {"epoch": -1}, "epoch -1"),
    ("heartbeat", {"member": Requests().member(-1)}, "rank -1"),
    ("agent", {"id": ""}, "id is empty"),
    ("agent", {"name": " "}, "name is empty"),
    ("agent", {"host": "h" * (MAX_NAME + 1)}, "host has 256"),
    ("agent", {"urls": []}, "urls is empty"),
    ("agent", {"urls": ["u" * (MAX_NAME + 1)]}, r"urls\[0\] has 256"),
    ("agent", {"urls": ["http://a"] * (MAX_ADDRESSES + 1)}, "65 URLs"),
    ("agent", {"leases": [Lease("l", "job", 0, 1, "")] * (MAX_LEASES + 1)}, "17 leases"),
    ("agent", {"leases": [Lease("", "job", 0, 1, "")]}, r"leases\[0\].id is empty"),
    ("agent", {"leases": [Lease("l", "j" * (MAX_NAME + 1), 0, 1, "")]}, r"leases\[0\].job has 256"),
    ("agent", {"leases": [Lease("l", "job", 1, 1, "")]}, "rank 1 is not in a world of 1"),
    ("agent", {"leases": [Lease("l", "job", 0, 1, "h" * (MAX_REASON + 1))]}, r"leases\[0\].holder has 4097"),
    ("lease", {"job": ""}, "job is empty"),
    ("lease", {"host_id": "h" * (MAX_NAME + 1)}, "host_id has 256"),
    ("lease", {"rank": 4}, "ranks go from 0 to 3"),
    ("lease", {"world_size": 0}, "world size 0"),
]


@pytest.mark.parametrize(("kind", "change", "text"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_invalid_requests(ask, kind, change, text):
    if kind == "member":
        kind, change = "join", {"member": replace(ask.member(0), **change)}
    check = {"join": check_join, "heartbeat": check_heartbeat, "agent": check_agent, "lease": check_lease}[kind]
    with pytest.raises(InvalidRequestError, match=text):
        check(replace(getattr(ask, kind)(0), **change))
