"""Stores that several processes share, under Ctrl-C and kill -9 too."""

from __future__ import annotations

import ctypes
import shlex
import socket
import sys
from datetime import timedelta

import numpy as np
import pytest
from support.processes import free_port, on_ranks, wait_until
from support.rank_server import LIGHT

import rankmesh as dist

pytestmark = pytest.mark.processes


def open_store(me, kind, port=0):
    """Return the store all ranks share."""
    if kind.startswith("prefix/"):
        return dist.PrefixStore("p", open_store(me, kind.removeprefix("prefix/"), port))
    if kind == "file":
        return dist.FileStore(f"{me.folder}/store", me.size)
    return dist.TCPStore("127.0.0.1", port, me.size, me.rank == 0, timedelta(seconds=60))


def share(me, port):
    for kind in ("tcp", "prefix/file"):
        store = open_store(me, kind, port)
        for _ in range(50):
            store.add("n", 1)
        store.append("all", str(me.rank))
        winner = store.compare_set("first", "", str(me.rank))
        store.set(f"value/{me.rank}", bytes([me.rank]) * 100_000)
        store.barrier("set", me.size)
        others = store.multi_get([f"value/{rank}" for rank in range(me.size)])
        assert others == [bytes([rank]) * 100_000 for rank in range(me.size)]
        assert (store.get("n"), sorted(store.get("all"))) == (b"200", sorted(b"0123"))
        assert store.get("first") == winner
        if kind == "tcp":
            taken = work(me, store)
        store.barrier("over", me.size)
        me.meet(f"over-{kind[:3]}")  # or the server would be gone before its last answer has come
    me.report(taken=taken)


def work(me, store):
    """Rank 0 gives work to the others through a queue; return the numbers that this rank takes."""
    if me.rank == 0:
        for item in [*range(30), *["stop"] * (me.size - 1)]:
            store.queue_push("work", str(item))
        store.wait([f"done/{rank}" for rank in range(1, me.size)])
        assert store.queue_len("work") == 0
        return []
    taken = list(map(int, iter(lambda: store.queue_pop("work"), b"stop")))
    store.set(f"done/{me.rank}", "")
    return taken


def test_four_processes_share_stores(ranks):
    taken = [rank.reported["taken"] for rank in ranks.run(share, 4, port=free_port())]
    assert sorted(number for each in taken for number in each) == list(range(30))
    assert all(each == sorted(each) for each in taken)
    assert not (ranks.folder / "store").exists()


@pytest.mark.parametrize(("kind", "call"), [("tcp master", "get"), ("tcp client", "pop"), ("file", "get")])
@on_ranks(1)
def test_ctrl_c_ends_a_wait(me, kind, call):
    """After it the store works, and nothing is left of the wait."""
    master = dist.TCPStore("127.0.0.1", 0, is_master=True) if kind.startswith("tcp") else None
    stores = {
        "tcp master": lambda: master,
        "tcp client": lambda: dist.TCPStore("127.0.0.1", master.port),
        "file": lambda: dist.FileStore(f"{me.folder}/store", 1),
    }
    store = stores[kind]()
    store.set("warm", "up")
    store.set_timeout(3600)
    calls = {"get": (store.get, "k"), "pop": (store.queue_pop, "q")}
    me.interrupt_when_waiting()
    assert me.attempt(*calls[call])["error"] == "KeyboardInterrupt"
    store.set("k", "v")
    assert store.get("k") == b"v"
    if call == "pop":
        store.queue_push("q", "not lost")
        assert store.queue_pop("q") == b"not lost"
    for each in {store, master} - {None}:
        each.close()
    # A server that is closed before it has loaded what it serves with ends when it has: later, on a busy machine.
    wait_until(lambda: not [name for name in me.resources()[0] if name.startswith("rankmesh")], "threads to end")


@pytest.mark.parametrize("master", [True, False])
@on_ranks(1)
def test_ctrl_c_ends_the_wait_for_the_others(me, master):
    me.interrupt_when_waiting()
    port = free_port()
    attempt = me.attempt(dist.TCPStore, "127.0.0.1", port, 2, master, timedelta(seconds=3600))
    assert attempt["error"] == "KeyboardInterrupt"
    socket.create_server(("127.0.0.1", port)).close()


def leaves_it_to_exit(me, port):
    for kind in ("tcp", "file"):
        store = open_store(me, kind, port)
        store.set("k", "v")
        assert store.get("k") == b"v"


def test_stores_are_closed_at_exit(ranks):
    port = free_port()
    ranks.run(leaves_it_to_exit, 1, port=port)
    assert not (ranks.folder / "store").exists()
    socket.create_server(("127.0.0.1", port)).close()


def serve(me, port):
    """Rank 0 has a TCPStore and loads nothing for its clients."""
    if me.rank == 0:
        store = dist.TCPStore("127.0.0.1", port, is_master=True)
        before = set(sys.modules)
        me.mark("served")
        assert store.get("there") == b"1"
        assert sorted(set(sys.modules) - before) == []
        me.mark("over")
    else:
        me.wait_for("served")
        store = dist.TCPStore("127.0.0.1", port)
        store.set("there", "1")
        me.wait_for("over")


def test_the_first_contact_needs_no_import(ranks):
    ranks.run(serve, 2, env={LIGHT: "1"}, port=free_port())


def hold(me, port):
    """Rank 0 has a TCPStore, and holds the interpreter's lock as extensions may."""
    store = open_store(me, "tcp", port)
    if me.rank == 0:
        me.wait_for("connected")
        command = f"cd {shlex.quote(str(me.folder))}; touch held; until [ -e caught ]; do sleep 0.05; done"
        assert ctypes.PyDLL(None).system(command.encode()) == 0
        return
    store.set_timeout(timedelta(seconds=1))
    me.mark("connected")
    me.wait_for("held")
    for call, limit in ((lambda: store.set("other", "1"), "1 s"), (lambda: store.get("missing"), "1 s and 1.5 s more")):
        caught = me.attempt(call)
        assert {"StoreTimeoutError", "DistNetworkError", "TimeoutError"} <= set(caught["is"]), caught
        assert f"within {limit}" in caught["text"]
        assert f"127.0.0.1:{port}" in caught["text"]
    me.mark("caught")


def test_a_busy_master_is_named_in_time(ranks):
    ranks.run(hold, 2, port=free_port())


def meets(me, port):
    for kind in ("prefix/prefix/tcp", "file"):
        store = open_store(me, kind, port)
        for turn in range(2):  # the second time, the store still has what was written the first time
            dist.init_process_group("gloo", store=store, rank=me.rank, world_size=3, timeout=timedelta(seconds=60))
            array = np.full(3, me.rank + 1.0 + turn)
            dist.all_reduce(array)
            assert array.tolist() == [6.0 + 3 * turn] * 3
            dist.destroy_process_group()
            me.meet(f"end-{kind.replace('/', '-')}-{turn}")


def test_ranks_meet_through_a_store(ranks):
    ranks.run(meets, 3, port=free_port())
