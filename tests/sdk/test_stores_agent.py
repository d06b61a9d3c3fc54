"""The job's own store: the same keys through the SDK and over HTTP, at every rank."""

from __future__ import annotations

import os
import sys
import urllib.request
from datetime import timedelta

import pytest
from support.processes import on_ranks, wait_until

import rankmesh as dist
from rankmesh._session import session
from rankmesh._stores import AgentStore


@on_ranks(3, env={"RANKMESH_TOKEN": "a secret"})
def test_the_keys_are_the_same_at_all_ranks(me):
    me.init()
    agent, ranks = session._default.agent, range(me.size)
    store = AgentStore(agent, timedelta(seconds=30))

    def request(method, path, body=None):
        headers = {"Authorization": f"Bearer {os.environ['RANKMESH_TOKEN']}"}
        found = urllib.request.Request(agent.member.http + path, body, headers, method=method)
        with urllib.request.urlopen(found, timeout=20) as answer:
            return answer.read()

    store.set(f"sdk/{me.rank}", f"set by {me.rank}")
    request("PUT", f"/v1/store/http/{me.rank}", f"put by {me.rank}".encode())
    store.wait([f"{how}/{rank}" for how in ("sdk", "http") for rank in ranks])
    for rank in ranks:
        assert request("GET", f"/v1/store/sdk/{rank}") == f"set by {rank}".encode()
        assert store.get(f"http/{rank}") == f"put by {rank}".encode()
    for _ in range(10):
        store.add("n", 1)
    store.queue_push("q", str(me.rank))
    dist.barrier()
    assert store.get("n") == store.clone().get("n") == request("GET", "/v1/store/n") == b"30"
    keys = sorted([*(f"{how}/{rank}" for how in ("sdk", "http") for rank in ranks), "n"])
    assert [key for key in store.list_keys() if not key.startswith(("popped/", "swap"))] == keys
    store.set(f"popped/{me.rank}", store.queue_pop("q"))
    assert sorted(store.multi_get([f"popped/{rank}" for rank in ranks])) == [b"0", b"1", b"2"]
    assert store.compare_set("swap", "", str(me.rank)) == store.get("swap")

    def wait_for_missing():
        attempt = me.attempt(store.wait, ["missing"], 0.1)
        return None if attempt["error"] == "StoreUnresponsiveError" else attempt

    attempt = wait_until(wait_for_missing, "an answer of the gateway, which may have no core for a while", 30)
    assert attempt["error"] == "StoreTimeoutError"
    assert "'missing'" in attempt["text"]
    assert attempt["seconds"] < 30
    child = os.fork()
    if child == 0:
        forked = me.attempt(store.get, "n")
        sys.stdout.flush()
        right = forked["error"] == "DistStoreError" and "belongs to the process that was forked" in forked["text"]
        os._exit(not right)
    assert os.waitpid(child, 0)[1] == 0
    assert store.get("n") == b"30"
    dist.barrier()
    dist.destroy_process_group()
    assert me.attempt(store.get, "n")["error"] == "DistNetworkError"


def test_every_object_is_the_same_store(alone):
    store, other = (AgentStore(session._default.agent) for _ in range(2))  # type: ignore[union-attr]
    store.set("k", "1")
    assert other.add("k", 1) == 2
    other.close()
    assert store.get("k") == b"2"
    assert repr(store) == "the store of rank 0's job"
    with pytest.raises(dist.DistStoreError, match="is closed"):
        other.get("k")
    store.close()
