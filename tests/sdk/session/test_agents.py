"""Attaching by init_process_group: when it does, what it says when it cannot, and what an agent's end does."""

from __future__ import annotations

import os
import signal
import time

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


def until_it_fails() -> None:
    for _ in range(2000):
        dist.all_reduce(np.ones(3))
        time.sleep(0.005)


def lose_the_agent(me: Me, method: str) -> None:
    dist.init_process_group(init_method=method, rank=me.rank, world_size=2, timeout=30)
    agent = dist._session.session.current().agent
    dist.barrier()
    me.report(name=agent._client._offer.name)
    if me.rank == 0:
        os.kill(agent._client._offer.pid, signal.SIGKILL)
        me.report(**me.attempt(until_it_fails))
        me.mark("over")
    else:
        me.report(**me.attempt(until_it_fails))
        me.wait_for("over")
    dist.destroy_process_group()


def test_the_loss_of_an_agent_is_the_loss_of_its_rank(ranks: Ranks) -> None:
    started = ranks.run(lose_the_agent, 2, method=hosting.cluster({}, 2, "to be killed").url)
    for rank in started:
        assert rank.reported["error"] == "RankFailedError"
        assert rank.reported["ranks"] == [0]
        assert rank.reported["seconds"] < 30
    assert f"the agent of this rank, '{started[0].reported['name']}'" in started[0].reported["text"]


def come_and_go(me: Me, method: str) -> None:
    found = []
    for _ in range(5):
        dist.init_process_group(init_method=method, rank=me.rank, world_size=2, timeout=30)
        group = dist.new_group([0, 1])
        dist.all_reduce(np.ones(10), group=group)
        dist.get_default_store().add("n", 1)
        dist.barrier()
        dist.destroy_process_group()
        found.append(me.resources())
    assert found[2] == found[-1], found


def test_nothing_is_left_of_worlds_that_have_ended(ranks: Ranks) -> None:
    ranks.run(come_and_go, 2, method=hosting.cluster({}, 2).url)
