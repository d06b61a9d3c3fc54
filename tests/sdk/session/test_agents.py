"""Attaching by init_process_group: when it does, what it says when it cannot, and what an agent's end does."""

from __future__ import annotations

import numpy as np
import pytest
from support import hosting
from support.processes import Me, Ranks

import rankmesh as dist

pytestmark = pytest.mark.processes


def by(me: Me, method: str, embedded: list[int] | None = None, **options: object) -> None:
    if me.rank in (embedded or []):
        method += "?hosting=embedded"
    failed = me.attempt(dist.init_process_group, init_method=method, rank=me.rank, world_size=me.size, **options)
    me.report(**failed)
    if failed["error"] is None:
        me.report(agent=type(dist._session.session.current().agent).__name__)
        array = np.ones(1000)
        dist.all_reduce(array)
        assert (array == me.size).all()
        dist.destroy_process_group()
        assert not dist.is_initialized()


def test_a_gateway_with_agents_has_processes_attach_and_others_may_join_them(ranks: Ranks) -> None:
    url = hosting.cluster({}, 3).url
    reported = [rank.reported for rank in ranks.run(by, 3, method=url, embedded=[1])]
    assert [one["agent"] for one in reported] == ["RemoteAgent", "Agent", "RemoteAgent"]


def test_a_gateway_without_agents_leaves_them_embedded(ranks: Ranks, gateway: str) -> None:
    assert [rank.reported["agent"] for rank in ranks.run(by, 2, method=gateway)] == ["Agent"] * 2


def test_who_insists_on_an_agent_is_told_that_there_is_none(ranks: Ranks, gateway: str) -> None:
    reported = ranks.run(by, 1, method=f"{gateway}?hosting=attached", timeout=1)[0].reported
    assert reported["error"] in ("DistNetworkError", "NoAgentsError")
    assert "no standalone agent" in reported["text"]


def test_a_hosting_that_there_is_not(ranks: Ranks, gateway: str) -> None:
    reported = ranks.run(by, 1, method=f"{gateway}?hosting=cloud")[0].reported
    assert (reported["error"], "hosting='cloud'" in reported["text"]) == ("ValueError", True)
