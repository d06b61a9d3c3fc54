"""Each thing a request may not be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rankmesh_agent.wire.schemas import GroupInfo
from rankmesh_gateway.checks import (
    MAX_ADDRESSES,
    MAX_GROUPS,
    MAX_NAME,
    MAX_WORLD_SIZE,
    InvalidRequestError,
    check_heartbeat,
    check_join,
)


def test_an_ordinary_request_passes(ask):
    check_join(ask.join(0))
    check_join(ask.join(MAX_WORLD_SIZE - 1, MAX_WORLD_SIZE))
    check_join(ask.join_unassigned(0))
    check_heartbeat(ask.heartbeat(1))


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
