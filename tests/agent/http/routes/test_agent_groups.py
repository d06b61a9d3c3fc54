"""Who the agent is, and its groups."""

from __future__ import annotations

from dataclasses import asdict

import pytest

pytestmark = pytest.mark.anyio


async def test_info(client, agent):
    answer = await client.get("/v1/info")
    assert (answer.status_code, answer.json()) == (200, asdict(agent.info()))


async def test_groups(client, agent):
    answer = await client.get("/v1/groups")
    assert (answer.status_code, answer.json()) == (200, [asdict(group) for group in agent.groups()])


async def test_one_group(client, agent):
    answer = await client.get("/v1/groups/00000000000000bb")
    assert (answer.status_code, answer.json()) == (200, asdict(agent.groups()[1]))


async def test_no_such_group(client):
    answer = await client.get("/v1/groups/00000000000000cc")
    assert answer.status_code == 404
    assert (answer.json()["code"], answer.json()["group"]) == ("group-not-found", "00000000000000cc")


async def test_one_group_by_its_name(client, agent):
    answer = await client.get("/v1/groups/world")
    assert (answer.status_code, answer.json()) == (200, asdict(agent.groups()[0]))


async def test_what_is_too_long_for_a_group(client):
    answer = await client.get(f"/v1/groups/{'x' * 300}")
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-request")
    assert answer.json()["detail"].startswith("path.group_id: ")
