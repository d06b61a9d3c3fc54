"""Stores whose owner is busy: the caller's timeout decides how long a call waits for it."""

from __future__ import annotations

import ctypes
import os
import shlex
import socket
import sys
import time
from datetime import timedelta

import pytest
from support.me import RANK_FAILED
from support.processes import free_port, on_ranks

import rankmesh as dist
from rankmesh._session.session import require_session

HELD_SECONDS = 13
"""Longer than any limit of the store's own, shorter than its default timeout."""

pytestmark = pytest.mark.processes


def hold_the_interpreter(me, until):
    """Make a mark, and wait for a shell's command, in a call that keeps the interpreter's lock, as extensions may."""
    command = f"cd {shlex.quote(str(me.folder))}; touch held; {until}"
    assert ctypes.PyDLL(None).system(command.encode()) == 0


@pytest.mark.slow
@on_ranks(5)
def test_the_owner_holds_the_interpreters_lock(me):
    """It is the first request of ranks 1 and 2, not of 3 and 4."""
    me.init()
    store = dist.get_default_store()
    if me.rank > 2:
        store.set(f"here/{me.rank}", "")
    dist.barrier()
    if me.rank == 0:
        hold_the_interpreter(me, f"sleep {HELD_SECONDS}")
    elif me.rank in (1, 3):
        me.wait_for("held")
        began = time.monotonic()
        key = f"k{me.rank}"
        store.set(key, "1")
        assert store.add(key, 1) == 2
        assert store.get(key) == b"2"
        assert time.monotonic() - began < HELD_SECONDS + 20
    else:
        store.set_timeout(timedelta(seconds=2))
        me.wait_for("held")
        for call, limit in (((store.set, "other", "1"), "2 s"), ((store.get, "missing"), "2 s and 1.5 s more")):
            caught = me.attempt(*call)
            assert {"StoreTimeoutError", "DistNetworkError", "TimeoutError"} <= set(caught["is"]), caught
            owner = require_session().agent.members()[0]
            assert f"within {limit}" in caught["text"]
            assert caught["ranks"] == [0]
            assert owner.http in caught["text"]
            assert f"pid {owner.pid}" in caught["text"]
            assert 1.9 < caught["seconds"] < HELD_SECONDS
    dist.barrier()
    dist.destroy_process_group()


@on_ranks(3)
def test_errors_name_the_owner_by_its_number_in_a_shrunken_world(me):
    me.init()
    if me.rank == 0:
        me.wait_for("over")
        return  # without a word to the others, who go on
    pid = os.getpid() if me.rank == 1 else require_session().agent.members()[1].pid
    dist.shrink_group([0])
    store = dist.get_default_store()
    store.set(f"here/{me.rank}", "")
    dist.barrier()
    if me.rank == 1:
        hold_the_interpreter(me, f"until [ -e caught ] || [ -e {RANK_FAILED} ]; do sleep 0.05; done")
    else:
        store.set_timeout(timedelta(seconds=1))
        me.wait_for("held")
        caught = me.attempt(store.set, "k", "1")
        me.mark("caught")
        assert (caught["error"], caught["ranks"]) == ("StoreUnresponsiveError", [0]), caught
        assert f"of rank 0 ({socket.gethostname()}, pid {pid})" in caught["text"]
    dist.barrier()
    me.mark("over")
    dist.destroy_process_group()


def serve(me, port):
    """Rank 0 owns a TCPStore and loads nothing for its clients."""
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
    ranks.run(serve, 2, port=free_port())
