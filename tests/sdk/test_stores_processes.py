"""Stores that several processes share, under Ctrl-C and kill -9 too."""

from __future__ import annotations

import socket

import pytest
from support.processes import free_port, wait_until

import rankmesh as dist

pytestmark = pytest.mark.processes


def open_store(me, kind, port=0):
    """Return the store all ranks share."""
    from datetime import timedelta

    if kind.startswith("prefix/"):
        return dist.PrefixStore("p", open_store(me, kind.removeprefix("prefix/"), port))
    if kind == "file":
        return dist.FileStore(f"{me.folder}/store", me.size)
    return dist.TCPStore("127.0.0.1", port, me.size, me.rank == 0, timedelta(seconds=60))


def share(me, kind, port):
    store = open_store(me, kind, port)
    for _ in range(50):
        store.add("n", 1)
    store.append("all", str(me.rank))
    winner = store.compare_set("first", "", str(me.rank))
    store.set(f"value/{me.rank}", bytes([me.rank]) * 100_000)
    store.barrier("set", me.size)
    others = store.multi_get([f"value/{rank}" for rank in range(me.size)])
    assert others == [bytes([rank]) * 100_000 for rank in range(me.size)]
    me.say(n=store.get("n").decode(), all="".join(sorted(store.get("all").decode())), winner=winner.decode())
    store.barrier("over", me.size)
    me.meet("over")  # or the server would be gone before its last answer has come


@pytest.mark.parametrize("kind", ["tcp", "prefix/file"])
def test_four_processes_share_a_store(ranks, kind):
    said = [rank.said for rank in ranks.run(share, 4, kind=kind, port=free_port())]
    assert [one["n"] for one in said] == ["200"] * 4
    assert [one["all"] for one in said] == ["0123"] * 4
    assert len({one["winner"] for one in said}) == 1
    assert not (ranks.folder / "store").exists()


def workers(me, port):
    store = open_store(me, "tcp", port)
    if me.rank == 0:
        for number in range(30):
            store.queue_push("work", str(number))
        for _ in range(me.size - 1):
            store.queue_push("work", "stop")
        store.wait([f"done/{rank}" for rank in range(1, me.size)])
        me.say(left=store.queue_len("work"))
    else:
        taken = []
        while (value := store.queue_pop("work")) != b"stop":
            taken.append(int(value))
        me.say(taken=taken)
        store.set(f"done/{me.rank}", "")
    me.meet("end")


def test_workers_take_work_from_a_queue(ranks):
    master, *others = ranks.run(workers, 3, port=free_port())
    assert sorted(number for rank in others for number in rank.said["taken"]) == list(range(30))
    assert all(rank.said["taken"] == sorted(rank.said["taken"]) for rank in others)
    assert master.said["left"] == 0


def interrupted(me, kind, call):
    """Press Ctrl-C in a wait; after it the store works, and nothing is left of the wait."""
    master = dist.TCPStore("127.0.0.1", 0, is_master=True) if kind.startswith("tcp") else None
    stores = {
        "tcp master": lambda: master,
        "tcp client": lambda: dist.TCPStore("127.0.0.1", master.port),
        "file": lambda: dist.FileStore(f"{me.folder}/store", 1),
        "hash": dist.HashStore,
    }
    store = stores[kind]()
    store.set("warm", "up")
    store.set_timeout(3600)
    calls = {"get": (store.get, "k"), "wait": (store.wait, ["k"]), "pop": (store.queue_pop, "q")}
    me.interrupt_when_waiting()
    me.say(attempt=me.attempt(*calls[call]))
    store.set("k", "v")
    assert store.get("k") == b"v"
    if call == "pop":
        store.queue_push("q", "not lost")
        assert store.queue_pop("q") == b"not lost"
    for each in {store, master} - {None}:
        each.close()
    # A server that is closed before it has loaded what it serves with ends when it has: later, on a busy machine.
    wait_until(lambda: not [name for name in me.resources()[0] if name.startswith("rankmesh")], "threads to end")


@pytest.mark.parametrize(
    ("kind", "call"),
    [("tcp master", "get"), ("tcp client", "wait"), ("tcp client", "pop"), ("hash", "pop"), ("file", "get")],
)
def test_ctrl_c_ends_a_wait(ranks, kind, call):
    (rank,) = ranks.run(interrupted, 1, kind=kind, call=call)
    assert rank.said["attempt"]["error"] == "KeyboardInterrupt"
    assert rank.said["attempt"]["at"] - rank.said["interrupted_at"] < 30


def at_start(me, port, role):
    from datetime import timedelta

    me.interrupt_when_waiting()
    master = role == "master"
    me.say(attempt=me.attempt(dist.TCPStore, "127.0.0.1", port, 2, master, timedelta(seconds=3600)))


@pytest.mark.parametrize("role", ["master", "client"])
def test_ctrl_c_ends_the_wait_for_the_others(ranks, role):
    port = free_port()
    (rank,) = ranks.run(at_start, 1, port=port, role=role)
    assert rank.said["attempt"]["error"] == "KeyboardInterrupt"
    assert rank.said["attempt"]["at"] - rank.said["interrupted_at"] < 30
    with socket.create_server(("127.0.0.1", port)):
        pass


def orphaned(me, port):
    store = open_store(me, "tcp", port)
    me.mark(f"ready-{me.rank}")
    me.say(attempt=me.attempt(store.get, "never"))


def test_a_wait_for_a_killed_master_fails(ranks):
    port = free_port()
    master, client = ranks.start(orphaned, 2, port=port)
    ranks.wait_for("ready-0", "ready-1")
    killed = master.kill()
    ranks.wait([master])
    ranks.succeed([client])
    assert client.said["attempt"]["error"] == "DistNetworkError"
    assert f"127.0.0.1:{port}" in client.said["attempt"]["text"]
    assert client.said["attempt"]["at"] - killed < 30


def killed_writers(me):
    store = dist.FileStore(f"{me.folder}/store")
    me.mark(f"ready-{me.rank}")
    while True:
        store.set("k", "x" * 50_000)


def test_writers_that_are_killed_leave_a_file_that_works(ranks):
    started = ranks.start(killed_writers, 3)
    ranks.wait_for(*(f"ready-{rank}" for rank in range(3)))
    for rank in started:
        rank.kill()
    ranks.wait(started)
    store = dist.FileStore(str(ranks.folder / "store"))
    assert store.check(["k"]) in (True, False)
    store.set("k", "y")
    assert dist.FileStore(str(ranks.folder / "store")).get("k") == b"y"


def leaves_it_to_exit(me, kind, port):
    store = open_store(me, kind, port)
    store.set("k", "v")
    me.say(k=store.get("k").decode())


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_stores_are_closed_at_exit(ranks, kind):
    port = free_port()
    ranks.run(leaves_it_to_exit, 1, kind=kind, port=port)
    assert not (ranks.folder / "store").exists()
    with socket.create_server(("127.0.0.1", port)):
        pass


def meets(me, kind, port):
    from datetime import timedelta

    import numpy as np

    store = open_store(me, kind, port)
    for turn in range(2):  # the second time, the store still has what was written the first time
        dist.init_process_group("gloo", store=store, rank=me.rank, world_size=me.size, timeout=timedelta(seconds=60))
        array = np.full(3, me.rank + 1.0 + turn)
        dist.all_reduce(array)
        me.say(**{f"sum-{turn}": array.tolist()})
        dist.destroy_process_group()
        me.meet(f"end-{turn}")


@pytest.mark.parametrize("kind", ["prefix/prefix/tcp", "file"])
def test_ranks_meet_through_a_store(ranks, kind):
    for rank in ranks.run(meets, 3, kind=kind, port=free_port()):
        assert rank.said["sum-0"] == [6.0] * 3
        assert rank.said["sum-1"] == [9.0] * 3


def test_a_world_of_one_meets_through_a_hash_store():
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()
