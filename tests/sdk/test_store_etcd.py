"""A job whose gateway keeps the stores in etcd: gateways that are killed and replaced, and an etcd that stops."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from support.etcd import Etcd
from support.gateway_process import GatewayProcess
from support.processes import Me, Ranks

import rankmesh as dist

pytestmark = pytest.mark.processes


def call_all(store: Any) -> None:
    """Make every call of a store that changes something."""
    store.set("set", "1")
    store.set("deleted", "1")
    assert store.delete_key("deleted")
    assert store.add("sum", 5) == 5
    store.append("appended", "a")
    store.append("appended", "b")
    assert store.compare_set("compared", "", "1") == b"1"
    assert store.compare_set("compared", "1", "2") == b"2"
    store.multi_set(["m1", "m2"], ["1", "2"])
    for value in "abc":
        store.queue_push("queue", value)
    assert store.queue_pop("queue") == b"a"


def check_all(store: Any) -> None:
    """Make every call that reads, of what ``call_all`` has left."""
    store.wait(["set", "m1"])
    assert store.check(["set", "sum"])
    assert not store.check(["deleted"])
    assert store.get("set") == b"1"
    assert store.multi_get(["sum", "appended", "compared", "m1", "m2"]) == [b"5", b"ab", b"2", b"1", b"2"]
    assert {"set", "sum", "appended", "compared", "m1", "m2"} <= set(store.list_keys())
    assert store.num_keys() >= 6
    assert store.queue_len("queue") == 2


def use(me: Me, url: str) -> None:
    me.init(init_method=url)
    store = dist.get_default_store()
    if me.rank == 0:
        call_all(store)
    dist.barrier()
    check_all(store)
    me.mark(f"first-{me.rank}")
    me.wait_for("killed")
    check_all(store)  # waits for the next gateway
    dist.barrier()
    if me.rank == 1:
        assert store.queue_pop("queue") == b"b"
        assert store.queue_pop("queue") == b"c"
        assert store.add("sum", 1) == 6
    dist.barrier()
    assert store.get("sum") == b"6"
    assert store.queue_len("queue") == 0
    dist.destroy_process_group()


def test_a_gateway_that_is_killed_and_started_elsewhere_has_all(ranks: Ranks, etcd: Etcd) -> None:
    gateway = GatewayProcess(ranks, keeps_state=False, options=[f"--store={etcd.url()}"])
    started = ranks.start(use, 2, url=gateway.url)
    ranks.wait_for("first-0", "first-1")
    gateway.end()
    ranks.mark("killed")
    gateway.start()
    ranks.succeed(started)
    gateway.end()


def fail(me: Me, url: str) -> None:
    me.init(init_method=url)
    store = dist.get_default_store()
    store.set("key", "before")
    me.mark("set")
    me.wait_for("stopped")
    began = time.monotonic()
    for call in (lambda: store.set("key", "after"), lambda: store.multi_set(["key", "other"], ["after", "after"])):
        caught = me.attempt(call)
        assert caught["error"] in ("DistStoreError", "OutcomeUnknownError"), caught
        assert "etcd at etcd://" in caught["text"], caught
    assert time.monotonic() - began < 10
    assert store.get("key") == b"before"
    assert store.num_keys() == 1
    me.mark("failed")
    me.wait_for("started")
    store.set("key", "after")
    me.mark("set-again")
    me.wait_for("replaced")
    caught = me.attempt(lambda: store.set("key", "late"))
    assert "another gateway has taken over the stores" in caught["text"], caught
    assert store.get("key") == b"after"
    dist.destroy_process_group()


def test_an_etcd_that_stops_and_a_gateway_that_is_replaced(ranks: Ranks, tmp_path: Path) -> None:
    etcd = Etcd(tmp_path)
    options = [f"--store={etcd.url('p')}"]
    gateway = GatewayProcess(ranks, keeps_state=False, options=options)
    started = ranks.start(fail, 1, url=gateway.url)
    ranks.wait_for("set")
    etcd.stop()
    ranks.mark("stopped")
    ranks.wait_for("failed")
    etcd.start()
    ranks.mark("started")
    ranks.wait_for("set-again")
    other = GatewayProcess(ranks, keeps_state=False, options=options)
    ranks.mark("replaced")
    ranks.succeed(started)
    gateway.end()
    other.end()
    etcd.stop()


def test_a_gateway_without_its_etcd_does_not_start(ranks: Ranks) -> None:
    started = ranks.command("-m", "rankmesh_gateway", "--port=0", "--store=etcd://127.0.0.1:1/p", name="gateway")
    ranks.wait([started])
    assert started.code == 2
    assert "etcd at etcd://127.0.0.1:1/p cannot be reached" in started.stderr
    assert len(started.stderr.splitlines()) == 1
