"""A job whose gateway keeps the stores in etcd that stops, and a gateway that is replaced.

test_store_history.py has gateways that are killed.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.etcd import Etcd
from support.gateway_process import GatewayProcess
from support.processes import Me, Ranks

import rankmesh as dist

pytestmark = pytest.mark.processes


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
