"""Forked children of a rank: one that makes no call is as without RankMesh, one that does gets an error or starts anew.

RANKMESH_TEST_FORKS sets the number of children of the busy rank, 12 by default: one of each kind and transport.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import os
import sys
import threading
import traceback
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pytest
from support.processes import Me, Ranks, on_ranks, wait_until
from support.rank_server import LIGHT

import rankmesh as dist
from rankmesh._session.session import current
from rankmesh_agent.net import fork

FORKS = int(os.environ.get("RANKMESH_TEST_FORKS", "12"))
TRANSPORTS = ("shm", "tcp")
_BATCH = 4
_CHILD_SECONDS = 60.0


class Inherited(NamedTuple):
    """What a child has from its parent: a group whose calls go on, and Works that do not end meanwhile."""

    group: dist.ProcessGroup
    works: list[dist.Work]


def _exit(_: Inherited) -> NoReturn:
    sys.exit(0)  # runs what is registered for the exit


def _exit_at_once(_: Inherited) -> NoReturn:
    os._exit(0)


def _collect(inherited: Inherited) -> NoReturn:
    circle: list[Any] = [np.ones(10_000)]
    circle.append(circle)
    del circle, inherited
    gc.unfreeze()
    gc.collect()
    sys.exit(0)


def _fail_to_call(inherited: Inherited) -> NoReturn:
    group, array = inherited.group, np.ones(3)
    calls = [
        lambda: dist.all_reduce(array),
        lambda: dist.all_reduce(array, group=group),
        lambda: dist.all_reduce(array, group=group, async_op=True).wait(),
        lambda: dist.send(array, 1, group=group),
        lambda: dist.irecv(array, 1, group=group),
        lambda: dist.barrier(group=group),
        *(work.wait for work in inherited.works),
    ]
    parent = os.getppid()
    for call in calls:
        with pytest.raises((ValueError, dist.DistBackendError), match=f"process {parent}, which has"):
            call()
    sys.exit(0)


def _start_anew(_: Inherited) -> NoReturn:
    dist.init_process_group(init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    array = np.ones(3)
    dist.all_reduce(array)
    dist.get_default_store().set("key", b"value")
    dist.destroy_process_group()
    sys.exit(0)


def _fork_again(_: Inherited) -> NoReturn:
    child = multiprocessing.get_context("fork").Process(target=gc.collect)
    child.start()
    child.join()
    sys.exit(child.exitcode)


_CHILDREN: tuple[Callable[[Inherited], NoReturn], ...] = (
    _exit,
    _exit_at_once,
    _collect,
    _fail_to_call,
    _fork_again,
    _start_anew,
)


def _fork(number: int, inherited: Inherited) -> int:
    pid = os.fork()
    if pid == 0:
        faulthandler.enable()
        faulthandler.dump_traceback_later(_CHILD_SECONDS, exit=True)
        _CHILDREN[number % len(_CHILDREN)](inherited)
    return pid


def _reap(pids: list[int]) -> None:
    for pid in pids:
        status = os.waitpid(pid, 0)[1]
        assert status == 0, f"child {pid} ended with {os.waitstatus_to_exitcode(status)}"


def _call(group: dist.ProcessGroup, ending: bool) -> bool:
    """Make calls of several kinds, check their results, and return whether a rank is to end."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    state = np.array([1, ending])
    dist.all_reduce(state, group=group)
    assert state[0] == size
    long, short, received = np.full(70_000, float(rank + 1)), np.full(3, float(rank)), np.zeros(5_000)
    works = [
        dist.all_reduce(long, group=group, async_op=True),
        dist.all_reduce(short, group=group, async_op=True),
        dist.irecv(received, (rank - 1) % size, group=group),
        dist.isend(np.full(5_000, float(rank)), (rank + 1) % size, group=group),
    ]
    for work in works:
        assert work is not None
        work.wait()
    assert (long == size * (size + 1) / 2).all()
    assert (short == size * (size - 1) / 2).all()
    assert (received == (rank - 1) % size).all()
    return bool(state[1])


def _keep_calling(group: dist.ProcessGroup, ending: threading.Event) -> None:
    while not _call(group, ending.is_set()):
        pass


def _keep_storing(store: dist.Store, name: str, ending: threading.Event) -> None:
    number = store.add(f"{name}/count", 1)
    while not ending.is_set():
        number += 1
        store.set(name, b"%d" % number)
        assert store.get(name) == b"%d" % number
        assert store.add(f"{name}/count", 1) == number


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("forks", [FORKS // len(TRANSPORTS)])
@on_ranks(2, env={"RANKMESH_TRANSPORT": "{transport}"})
def test_forks_of_a_busy_rank(me: Me, forks: int) -> None:
    faulthandler.enable()
    me.init()
    groups = [dist.new_group() for _ in range(2)]
    quiet = dist.new_group()
    ending = threading.Event()
    failures: list[str] = []

    def run(target: Callable[..., None], *arguments: Any) -> None:
        try:
            target(*arguments, ending)
        except BaseException:
            failures.append(traceback.format_exc())

    store, key = dist.get_default_store(), f"rank {me.rank}"
    for group in [*groups, quiet]:
        _call(group, False)
    store.set(key, b"")
    dist.barrier()
    threads_before, before = me.resources()
    work = [*((_keep_calling, group) for group in groups), (_keep_storing, store, key)]
    threads = [threading.Thread(target=run, args=each, daemon=True) for each in work]
    for thread in threads:
        thread.start()
    if me.rank == 0:
        array, received = np.ones(3), np.ones(3)
        begun = [dist.all_reduce(array, group=quiet, async_op=True), dist.irecv(received, 1, group=quiet)]
        for number in range(0, forks, _BATCH):
            numbers = range(number, min(number + _BATCH, forks))
            _reap([_fork(each, Inherited(quiet, begun)) for each in numbers])
            assert not failures, "\n".join(failures)
        dist.barrier()
        for each in begun:
            each.wait()
        assert (array == 2).all()
        assert (received == 7).all()
    else:
        dist.barrier()
        dist.all_reduce(np.ones(3), group=quiet)
        dist.send(np.full(3, 7.0), 0, group=quiet)
    ending.set()
    for thread in threads:
        thread.join()
    assert not failures, "\n".join(failures)
    threads_now, descriptors = me.resources()
    more = Counter(threads_now) - Counter(threads_before)
    # The store's thread starts with the first client, even one of another test that looks for its store at this port.
    assert all(name.startswith("rankmesh-store-") for name in more), (threads_before, threads_now)
    assert all(count <= before.get(kind, 0) for kind, count in descriptors.items()), (before, descriptors)
    dist.destroy_process_group()


@on_ranks(1, env={LIGHT: "1"})
def test_forks_while_a_thread_imports_the_http_server(me: Me) -> None:
    """A module that a thread of the parent was importing could never be imported in the child."""
    fork._FORK_SECONDS = 60.0  # on a busy machine the import may take longer than forks usually wait
    me.init()
    session = current()
    assert session is not None
    url = session.agent.member.http
    imported = {"fastapi", "uvicorn", "pydantic"}
    client = threading.Thread(target=lambda: urllib.request.urlopen(f"{url}/health", timeout=60).close(), daemon=True)
    client.start()
    children = []
    while client.is_alive():
        child = os.fork()
        if child == 0:
            faulthandler.enable()
            faulthandler.dump_traceback_later(20, exit=True)
            for name in imported & sys.modules.keys():
                importlib.import_module(name)
            os._exit(0)
        children.append(child)
        client.join(0.05)
    _reap(children)
    assert imported <= sys.modules.keys()
    dist.destroy_process_group()


def _fork_and_wait(me: Me) -> None:
    """Rank 1 has a child when it is killed."""
    me.init()
    dist.barrier()
    if me.rank == 1:
        if os.fork() == 0:
            me.report(child=os.getpid())
            me.wait_for("told")
            os._exit(0)
        me.wait_for("never")
    me.report(**me.attempt(dist.all_reduce, np.ones(3)))
    os._exit(0)


def _has_ended(pid: int) -> bool:
    try:
        return not Path(f"/proc/{pid}/environ").read_bytes()  # that of a zombie is empty
    except OSError:
        return True


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_child_does_not_hide_the_death_of_its_parent(ranks: Ranks, transport: str) -> None:
    waiting, killed = ranks.start(_fork_and_wait, 2, env={"RANKMESH_TRANSPORT": transport})
    wait_until(lambda: "child" in killed.reported, "the child to start")
    killed.kill()
    ranks.wait([waiting, killed])
    ranks.mark("told")
    assert waiting.reported["error"] == "RankFailedError"
    assert waiting.reported["ranks"] == [1]
    wait_until(lambda: _has_ended(killed.reported["child"]), "the child to end")
