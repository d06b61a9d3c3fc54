"""Each thing a request may not be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rankmesh_agent.wire.schemas import GroupInfo, Lease
from rankmesh_gateway.state.validation import (
    MAX_ADDRESSES,
    MAX_GROUPS,
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
    check_heartbeat(ask.heartbeat(1))
    check_agent(ask.agent(0))
    check_agent(ask.agent(0, leased_to="pid 7"))
    check_lease(ask.lease(0))
    check_lease(ask.lease())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"job": " "}, "job is empty"),
        ({"job": "j" * (MAX_NAME + 1)}, "job has 256 characters"),
        ({"world_size": 0}, "world size 0"),
        ({"world_size": MAX_WORLD_SIZE + 1}, "world size 65537"),
    ],
)
def test_the_job(ask, change, said):
    with pytest.raises(InvalidRequestError, match=said):
        check_join(replace(ask.join(0), **change))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rank": 2}, "ranks go from 0 to 1"),
        ({"rank": -2}, "rank -2"),
        ({"instance": ""}, "member.instance is empty"),
        ({"http": "h" * (MAX_NAME + 1)}, "member.http has 256"),
        ({"addresses": ["a" * (MAX_NAME + 1)]}, r"member.addresses\[0\]"),
        ({"addresses": ["a:1"] * (MAX_ADDRESSES + 1)}, "65 addresses"),
    ],
)
def test_the_member(ask, change, said):
    with pytest.raises(InvalidRequestError, match=said):
        check_join(replace(ask.join(0), member=replace(ask.member(0), **change)))


def test_the_heartbeat(ask):
    with pytest.raises(InvalidRequestError, match="epoch -1"):
        check_heartbeat(ask.heartbeat(0, epoch=-1))
    with pytest.raises(InvalidRequestError, match="rank -1"):
        check_heartbeat(ask.heartbeat(-1))
    group = GroupInfo("aa", "g", [0], 0, "self", "", "")
    with pytest.raises(InvalidRequestError, match="1025 groups"):
        check_heartbeat(ask.heartbeat(0, 2, *[group] * (MAX_GROUPS + 1)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"id": ""}, "id is empty"),
        ({"name": " "}, "name is empty"),
        ({"host": "h" * (MAX_NAME + 1)}, "host has 256"),
        ({"urls": []}, "urls is empty"),
        ({"urls": ["u" * (MAX_NAME + 1)]}, r"urls\[0\] has 256"),
        ({"urls": ["http://a"] * (MAX_ADDRESSES + 1)}, "65 URLs"),
        ({"leases": [Lease("l", "job", 0, 1, "")] * (MAX_LEASES + 1)}, "17 leases"),
        ({"leases": [Lease("", "job", 0, 1, "")]}, r"leases\[0\].id is empty"),
        ({"leases": [Lease("l", "j" * (MAX_NAME + 1), 0, 1, "")]}, r"leases\[0\].job has 256"),
        ({"leases": [Lease("l", "job", 1, 1, "")]}, "rank 1 is not in a world of 1"),
        ({"leases": [Lease("l", "job", 0, 1, "h" * (MAX_REASON + 1))]}, r"leases\[0\].holder has 4097"),
    ],
)
def test_an_agent(ask, change, said):
    with pytest.raises(InvalidRequestError, match=said):
        check_agent(replace(ask.agent(0), **change))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"job": ""}, "job is empty"),
        ({"host_id": "h" * (MAX_NAME + 1)}, "host_id has 256"),
        ({"rank": 4}, "ranks go from 0 to 3"),
        ({"world_size": 0}, "world size 0"),
    ],
)
def test_who_asks_for_an_agent(ask, change, said):
    with pytest.raises(InvalidRequestError, match=said):
        check_lease(replace(ask.lease(0), **change))
