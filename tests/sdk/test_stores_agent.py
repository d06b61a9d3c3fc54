"""The job's own store: the same keys through the SDK and over HTTP, at every rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from support import hosting

import rankmesh as dist
from rankmesh._session import session
from rankmesh._stores import AgentStore

pytestmark = pytest.mark.processes


def job_store(timeout=None):
    """Return the job's store, and the function that asks this rank's agent over HTTP."""
    import urllib.request
    from datetime import timedelta

    from rankmesh._session import session
    from rankmesh._stores import AgentStore

    agent = session._default.agent
    store = AgentStore(agent, timedelta(seconds=timeout or 30))

    def ask(method, path, body=None):
        request = urllib.request.Request(agent.member.http + path, body, method=method)
        token = os.environ.get("RANKMESH_TOKEN")
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.read()

    return store, ask


def one_truth(me):
    me.init()
    store, ask = job_store()
    store.set(f"sdk/{me.rank}", f"set by {me.rank}")
    ask("PUT", f"/v1/store/http/{me.rank}", f"put by {me.rank}".encode())
    everywhere = range(me.size)
    store.wait([f"{how}/{rank}" for how in ("sdk", "http") for rank in everywhere])
    for rank in everywhere:
        assert ask("GET", f"/v1/store/sdk/{rank}") == f"set by {rank}".encode()
        assert store.get(f"http/{rank}") == f"put by {rank}".encode()
    for _ in range(10):
        store.add("n", 1)
    store.queue_push("q", str(me.rank))
    dist.barrier()
    me.say(
        n=store.get("n").decode(),
        over_http=ask("GET", "/v1/store/n").decode(),
        keys=store.list_keys(),
        num_keys=store.num_keys(),
        popped=store.queue_pop("q").decode(),
        swapped=store.compare_set("swap", "", str(me.rank)).decode(),
        timeout=me.attempt(store.wait, ["missing"], 0.1),
        clone=store.clone().get("n").decode(),
        remote="Client" in type(store._store).__name__,
    )
    dist.barrier()
    dist.destroy_process_group()
    me.say(after=me.attempt(store.get, "n")["error"])


def test_what_one_sets_all_see(ranks):
    said = [rank.said for rank in ranks.run(one_truth, 3, env={"RANKMESH_TOKEN": "a secret"})]
    keys = sorted([*(f"{how}/{rank}" for how in ("sdk", "http") for rank in range(3)), "n"])
    assert [one["n"] for one in said] == ["30"] * 3
    assert [one["over_http"] for one in said] == ["30"] * 3
    assert [one["clone"] for one in said] == ["30"] * 3
    assert {tuple(key for key in one["keys"] if key != "swap") for one in said} == {tuple(keys)}
    assert sorted(one["popped"] for one in said) == ["0", "1", "2"]
    assert len({one["swapped"] for one in said}) == 1
    for one in said:
        assert one["timeout"]["error"] == "StoreTimeoutError"
        assert "'missing'" in one["timeout"]["text"]
        assert one["timeout"]["seconds"] < 30
    if not hosting.ATTACHED:
        assert [one["remote"] for one in said] == [False, True, True]
    assert [one["after"] for one in said][1:] == ["DistNetworkError"] * 2


class TestAlone:
    @pytest.fixture
    def store(self, alone) -> Iterator[dist.Store]:
        store = AgentStore(session._default.agent)  # type: ignore[union-attr]
        yield store
        store.close()

    def test_every_object_is_the_same_store(self, store):
        store.set("k", "1")
        other = AgentStore(session._default.agent)  # type: ignore[union-attr]
        assert other.add("k", 1) == 2
        other.close()
        assert store.get("k") == b"2"

    def test_its_name(self, store):
        assert repr(store) == "the store of rank 0's job"


def forked(me):
    me.init()
    store, _ = job_store()
    store.set("k", "v")
    child = os.fork()
    if child == 0:
        me.say(child=me.attempt(store.get, "k"))
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
    me.say(parent=store.get("k").decode())
    dist.barrier()
    dist.destroy_process_group()


def test_a_forked_child_is_not_a_rank(ranks):
    for rank in ranks.run(forked, 2):
        assert rank.said["child"]["error"] == "DistStoreError"
        assert "belongs to the process that was forked" in rank.said["child"]["text"]
        assert rank.said["parent"] == "v"
