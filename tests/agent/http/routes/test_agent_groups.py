"""Who the agent is, and its groups."""

from __future__ import annotations

from dataclasses import asdict

import pytest

pytestmark = pytest.mark.anyio


async def test_info_and_groups(client, agent):
    groups = [asdict(group) for group in agent.groups()]
    for path, shown in {
        "info": asdict(agent.info()),
        "groups": groups,
        "groups/00000000000000bb": groups[1],
        "groups/world": groups[0],
    }.items():
        answer = await client.get(f"/v1/{path}")
        assert (answer.status_code, answer.json()) == (200, shown)
