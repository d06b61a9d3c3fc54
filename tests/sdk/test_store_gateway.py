"""The job's store is the gateway's: what a gateway that ends, and a rank 0 that does not answer, are for the others."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import numpy as np
import pytest
from support.gateway_process import GatewayProcess
from support.hosting import embedded_only
from support.me import wait_until
from support.processes import Me, Ranks, free_port, on_ranks

import rankmesh as dist

pytestmark = pytest.mark.processes
CALL_SECONDS = 20.0
"""Limit of a call that nothing hinders, on a busy machine."""


def train(me: Me, until: str) -> int:
    """Call all_reduce until there is a mark, and return how often."""
    steps, over = 0, np.zeros(1, np.int64)
    while not over[0]:
        values = np.full(10, steps)
        dist.all_reduce(values)
        assert (values == me.size * steps).all()
        steps += 1
        over[0] = (me.folder / until).exists()
        dist.broadcast(over, 0)
    return steps


# The gateway


def lose_the_gateway(me: Me, url: str, comes_back: bool) -> None:
    me.init(init_method=url)
    store = dist.get_default_store()
    store.set("key", "value")
    dist.barrier()
    me.mark(f"set-{me.rank}")
    assert train(me, "ended") > 0
    store.set_timeout(timedelta(seconds=60 if comes_back else 1))
    calls: dict[str, Callable[[], object]] = {
        "set": lambda: store.set("key", "other"),
        "get": lambda: store.get("key"),
        "add": lambda: store.add("sum", 1),
        "wait": lambda: store.wait(["missing"], 1.0),
    }
    for name, call in calls.items():
        caught = me.attempt(call)
        if comes_back:
            assert caught["error"] == "StoreLostError", (name, caught)
            assert "started after the job, without the file of its state" in caught["text"], (name, caught)
        else:
            assert "DistNetworkError" in caught["is"], (name, caught)
            assert url in caught["text"], (name, caught)
            assert "gateway" in caught["text"], (name, caught)
            assert caught["seconds"] < CALL_SECONDS, (name, caught)
    values = np.ones(10)
    dist.all_reduce(values)
    assert (values == me.size).all()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("comes_back", [True, False], ids=["without its state", "never"])
def test_a_gateway_that_loses_the_store_or_does_not_come_back(ranks: Ranks, comes_back: bool) -> None:
    """Calls end with an error that says so, within their limit; collectives go on."""
    gateway = GatewayProcess(ranks, keeps_state=False)
    started = ranks.start(lose_the_gateway, 2, url=gateway.url, comes_back=comes_back)
    ranks.wait_for("set-0", "set-1")
    gateway.end()
    ranks.mark("ended")
    if comes_back:
        gateway.start()
    ranks.wait(started)
    assert [rank.code for rank in started] == [0, 0], ranks.transcript()
    if comes_back:
        gateway.end()


@on_ranks(3)
def test_each_world_has_a_new_store(me: Me) -> None:
    for _ in range(2):
        me.init()
        store = dist.get_default_store()
        dist.barrier()
        assert store.num_keys() == 0
        dist.barrier()
        store.set(f"key-{me.rank}", "value")
        store.queue_push("queue", "value")
        me.meet("set")
        dist.destroy_process_group()
        me.meet("left")


# Rank 0


def hold_the_interpreter() -> None:
    """Run a command in a call that keeps the interpreter's lock, as extensions may."""
    assert ctypes.PyDLL(None).system(b"until [ -e over ]; do sleep 0.05; done") == 0


FATES: dict[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "busy": hold_the_interpreter,
    "left": dist.destroy_process_group,
}


def go_on(me: Me, fate: str, method: str) -> None:
    """Rank 0 meets its fate; the others read what it and each other have set."""
    me.rank, me.size = int(os.environ.get("RANK", me.rank)), int(os.environ.get("WORLD_SIZE", me.size))
    os.chdir(me.folder)
    me.init(init_method=method)
    store = dist.get_default_store()
    store.set_timeout(timedelta(seconds=CALL_SECONDS))
    if me.rank == 0:
        store.multi_set(["by-0", "pid"], ["kept", str(os.getpid())])
        store.queue_push("queue", "kept")
        store.set("large", bytes(3 << 20))
    dist.barrier()
    if me.rank == 0:
        me.wait_for("begins-1", "begins-2")
        FATES[fate]()
        me.wait_for("over")
        return
    me.mark(f"begins-{me.rank}")
    time.sleep(0.5)
    began = time.monotonic()
    for number in range(50):
        store.set(f"by-{me.rank}/{number}", str(number))
        store.add("sum", 1)
        theirs = f"by-{3 - me.rank}/{number}"
        wait_until(partial(store.check, [theirs]), theirs)
        assert store.get(theirs) == str(number).encode()
    assert time.monotonic() - began < CALL_SECONDS
    wait_until(lambda: store.get("sum") == b"100", "all calls")
    assert store.multi_get(["by-0", "large"]) == [b"kept", bytes(3 << 20)]
    assert me.rank == 2 or store.queue_pop("queue") == b"kept"
    me.mark(f"done-{me.rank}")
    me.wait_for("done-1", "done-2")
    if fate == "stopped" and me.rank == 1:
        os.kill(int(store.get("pid")), signal.SIGKILL)
    me.mark("over")
    dist.destroy_process_group()
    me.mark(f"ends-{me.rank}")


@pytest.mark.parametrize(("method", "fate"), [*(("tcp", fate) for fate in FATES), ("run", "killed")])
@embedded_only("rank 0's own gateway, or the launcher's")
def test_the_others_calls_go_on_whatever_rank_0_does(ranks: Ranks, method: str, fate: str) -> None:
    """Afterwards no process, socket or file is left."""
    port, folders = free_port(), {"RANKMESH_SHM_DIR": ranks.folder / "shm", "TMPDIR": ranks.folder / "tmp"}
    for folder in folders.values():
        folder.mkdir()
    variables = {name: str(folder) for name, folder in folders.items()}
    if method == "run":
        script = str(ranks.script(go_on, fate=fate, method="env://"))
        options = ["--nproc-per-node=3", f"--master-port={port}", "--failure-grace=60"]
        ranks.wait([ranks.command("-m", "rankmesh.run", *options, script, "0", "3", name="launcher", **variables)])
    else:
        ranks.wait(ranks.start(go_on, 3, env=variables, fate=fate, method=f"tcp://127.0.0.1:{port}"))
    assert {"ends-1", "ends-2"} <= {*os.listdir(ranks.folder)}, ranks.transcript()
    wait_until(lambda: not ranks.left(), "the gateway's end", 30.0)
    socket.create_server(("127.0.0.1", port)).close()
    assert [name for folder in folders.values() for name in os.listdir(folder)] == []
