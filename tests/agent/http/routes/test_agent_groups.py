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


async def test_one_group_by_its_name(client, agent):
    answer = await client.get("/v1/groups/world")
    assert (answer.status_code, answer.json()) == (200, asdict(agent.groups()[0]))
