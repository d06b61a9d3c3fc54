"""One table of meetings: by which methods three processes come together, and what may happen when they do.

The driver runs ``meet`` in the three processes, for a method and an event, at a place of their own.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import rankmesh as dist
from support.me import Me, wait_until

SIZE = 3
SOON = 30.0
"""Seconds within which an error must come, on a busy machine too; a join that is refused might have taken 60."""


class Folder:
    """The least that can be a store: a file a key."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def _path(self, key: str) -> str:
        return os.path.join(self._folder, key.replace("/", "-"))

    def set(self, key: str, value: str) -> None:
        with open(self._path(f"{key}.new"), "w") as file:
            file.write(value)
        os.rename(self._path(f"{key}.new"), self._path(key))

    def get(self, key: str) -> bytes:
        with open(self._path(key), "rb") as file:
            return file.read()

    def wait(self, keys: list[str], timeout: Any) -> None:
        wait_until(lambda: all(os.path.exists(self._path(key)) for key in keys), "keys", timeout.total_seconds())


class Place(NamedTuple):
    """Where processes meet: by a method, at a port or in a folder, or at a gateway that runs."""

    method: str
    folder: str
    port: int
    gateway: str
    job: str

    def join(self, rank: int, size: int = SIZE, job: str = "", timeout: float = 60) -> None:
        """Join a job here; with rank -1, the gateway gives one."""
        options = METHODS[self.method](self, rank, size)
        dist.init_process_group(**options, group_name=self.job + job, timeout=timeout)

    def work(self, rank: int, size: int = SIZE, job: str = "") -> None:
        """Join, compute something, leave."""
        self.join(rank, size, job)
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, size, "mesh")
        check_world()
        dist.destroy_process_group()
        assert not dist.is_initialized()


def check_world() -> None:
    """Reduce over the world, later in a group, and send a message round."""
    rank, size = dist.get_rank(), dist.get_world_size()
    array, received = np.full(50_000, rank + 1.0), np.zeros(50_000)
    sending: Any = dist.isend(array.copy(), (rank + 1) % size)
    assert dist.recv(received, (rank - 1) % size) == (rank - 1) % size
    sending.wait()
    assert (received == (rank - 1) % size + 1).all()
    group = dist.new_group()
    for members in (None, group):
        work: Any = dist.all_reduce(array, group=members, async_op=members is not None)
        if work is not None:
            work.wait()
    assert (array == size * size * (size + 1) / 2).all()
    dist.destroy_process_group(group)


def _at(url: str, rank: int, size: int) -> dict[str, Any]:
    return {"init_method": url, "rank": rank, "world_size": size}


def _by_environment(at: Place, rank: int, size: int) -> dict[str, Any]:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(at.port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= place
    return {}


def _by_handler(at: Place, rank: int, size: int) -> dict[str, Any]:
    def handler(url: str, timeout: Any) -> Iterator[Any]:
        assert (url, timeout.total_seconds()) == ("folder://here", 60)
        yield Folder(at.folder), rank, size

    if at.job not in os.environ:
        dist.register_rendezvous_handler("folder", handler)
        os.environ[at.job] = "registered"
    return {"init_method": "folder://here"}


METHODS: dict[str, Callable[[Place, int, int], dict[str, Any]]] = {
    "tcp": lambda at, rank, size: _at(f"tcp://127.0.0.1:{at.port}", rank, size),
    "tcp over IPv6": lambda at, rank, size: _at(f"tcp://[::1]:{at.port}", rank, size),
    "URL": lambda at, rank, size: {"init_method": f"tcp://localhost:{at.port}?rank={rank}&world_size={size}"},
    "file": lambda at, rank, size: _at(f"file://{at.folder}/a meeting", rank, size),
    "environment": _by_environment,
    "store": lambda at, rank, size: {"store": Folder(at.folder), "rank": rank, "world_size": size},
    "handler": _by_handler,
    "gateway": lambda at, rank, size: _at(at.gateway, rank, size),
    "agents": lambda at, rank, size: _at(f"{at.gateway}?hosting=attached", rank, size),
    "multicast": lambda at, rank, size: _at(f"tcp://239.255.41.7:{at.port}", rank, size),
    "multicast over IPv6": lambda at, rank, size: _at(
        f"tcp://[ff15:1e18:5d4c:4cf0:d02d:b659:53ba:b0a7]:{at.port}", rank, size
    ),
}

# What may happen


def join_again(me: Me, at: Place) -> None:
    """Join and leave twice in the same process, which has the same threads and descriptors after both."""
    before = None
    for _ in range(2):
        at.work(me.rank)
        if at.method != "agents":  # some of what talks to an agent stays for the next world
            wait_until(lambda: me.resources()[0] == ["MainThread"], "the end of all threads, and of the gateway")
        after = me.resources()
        before = before or after
    assert after == before, f"{before} became {after}"


def wait_for_rank_0(me: Me, at: Place) -> None:
    """Rank 0 comes last."""
    if me.rank == 0:
        me.wait_for("trying-1", "trying-2")
        time.sleep(0.5)  # long enough for the others to find nobody there
    me.mark(f"trying-{me.rank}")
    at.work(me.rank)


def leave_working_directory(me: Me, at: Place) -> None:
    """Join after the working directory has been removed."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
    at.work(me.rank)


def miss_rank_2(me: Me, at: Place) -> None:
    """Rank 2 does not come before the others give up: they name it, and those who came; nothing is left of it."""
    at.work(me.rank)  # a process that has imported everything
    if me.rank != 2:
        wait_until(lambda: me.resources()[0] == ["MainThread"], "the end of the gateway")
        before = me.resources()
        me.mark(f"{os.getpid()} is {me.rank}")
        raised = me.attempt(at.join, me.rank, timeout=4)
        assert not dist.is_initialized()
        assert me.resources() == before, f"{before} became {me.resources()}"
        assert (raised["error"], raised["ranks"]) == ("JoinTimeoutError", [2]), raised
        assert "TimeoutError" in raised["is"], raised
        pids = {mark.name.split()[0] for mark in me.folder.glob("* is ?")}
        assert pids == {*re.findall(r"pid (\d+)", raised["text"])}, (pids, raised)
        assert raised["seconds"] < SOON, raised
        me.mark(f"gave up-{me.rank}")
    me.wait_for("gave up-0", "gave up-1")
    at.work(me.rank)


def come_twice(me: Me, at: Place, rank: int) -> None:
    """A third process comes to a world of two, as its rank 1 or without a rank; the world goes on."""
    if me.rank == 2:
        me.wait_for("up-0", "up-1")
        raised = me.attempt(at.join, rank, 2)
        assert raised["error"] == "RankTakenError", raised
        assert (f"none left for process {os.getpid()}" if rank < 0 else "rank 1") in raised["text"], raised
        assert raised["seconds"] < SOON, raised
        me.mark("refused")
        return
    at.join(rank if rank < 0 else me.rank, 2)
    me.mark(f"up-{me.rank}")
    me.wait_for("refused")
    check_world()
    dist.destroy_process_group()


def leave_ranks_out(me: Me, at: Place) -> None:
    """Process 1 comes as rank 2; the others are given ranks."""
    at.join(2 if me.rank == 1 else -1)
    found: list[Any] = [None] * SIZE
    dist.all_gather_object(found, (dist.get_rank(), me.rank))
    assert [rank for rank, _ in found] == [0, 1, 2], found
    assert found[2] == (2, 1), "an explicit rank is kept"
    dist.destroy_process_group()


def call_for_another_size(me: Me, at: Place) -> None:
    """Rank 1 comes with another world size than those who wait, again and again until they do."""
    if me.rank == 1:
        wait_until(lambda: _mismatch(me, at), "the others to wait", SOON)
    else:
        until = time.monotonic() + SOON
        while (raised := me.attempt(at.join, me.rank))["error"] == "WorldSizeMismatchError":
            assert time.monotonic() < until, "rank 1 always waits first"
            time.sleep(0.05)
        assert raised["error"] is None, raised
        check_world()
        dist.destroy_process_group()
        return
    at.work(me.rank)


def _mismatch(me: Me, at: Place) -> bool:
    raised = me.attempt(at.join, me.rank, SIZE + 1, timeout=1)
    if raised["error"] != "WorldSizeMismatchError":  # they do not wait yet, the gateway is slow, or has just ended
        assert raised["error"] is not None
        return False
    assert {str(SIZE), str(SIZE + 1)} <= {*re.findall(r"\d+", raised["text"])}, raised
    return True


def have_another_token(me: Me, at: Place) -> None:
    """Rank 1 has another token than the others, which wait; then the same."""
    os.environ["RANKMESH_TOKEN"] = "right"
    if me.rank == 1:
        os.environ["RANKMESH_TOKEN"] = "wrong"
        if at.method == "file":  # the gateway of the first to come would refuse the others
            meeting = Path(at.folder, "a meeting")
            wait_until(lambda: meeting.exists() and b"http" in meeting.read_bytes(), "another rank's gateway")
        before = me.resources()
        raised = me.attempt(at.join, 1)
        assert me.resources() == before
        assert raised["error"] == "AuthenticationError", raised
        assert "RANKMESH_TOKEN" in raised["text"], raised
        assert raised["seconds"] < SOON, raised
        os.environ["RANKMESH_TOKEN"] = "right"
    at.work(me.rank)


SETTINGS = {"RANKMESH_TRANSPORT": ("tcp", "shm"), "RANKMESH_FULL_MESH": ("0", "16")}
"""Settings that the ranks must agree on, and values of rank 0 and of the others."""


def have_other_settings(me: Me, at: Place) -> None:
    """Settings of rank 0 are not those of the others: all say so."""
    for variable, (first, other) in SETTINGS.items():
        os.environ[variable] = other if me.rank else first
        raised = me.attempt(at.join, me.rank)
        assert raised["error"] == "DistNetworkError", raised
        assert re.search(rf"{variable} differs .*: {first} on rank 0 .*; {other} on ", raised["text"]), raised
        assert raised["seconds"] < SOON, raised
        del os.environ[variable]
        me.meet(variable)
    at.work(me.rank)


def begin_while_rank_2_lingers(me: Me, at: Place) -> None:
    """The gateway of the first world outlives its host for rank 2, and is not the second one's."""
    at.join(me.rank)
    dist.barrier()
    if me.rank == 2:
        me.wait_for("rank 1 is back")
        time.sleep(0.5)
    dist.destroy_process_group()
    if me.rank == 1:
        me.mark("rank 1 is back")
    me.wait_for("rank 1 is back")
    at.work(me.rank)


def be_two_jobs(me: Me, at: Place) -> None:
    """A job of process 0, which hosts the gateway and ends, and one of the others, which goes on."""
    if me.rank == 0:
        at.join(0, 1, "-a")
        me.mark("a is up")
        me.wait_for("b is up-1", "b is up-2")
        dist.destroy_process_group()
        me.mark("a has ended")
        return
    me.wait_for("a is up")
    at.join(me.rank - 1, 2, "-b")
    dist.get_default_store().add("there", 1)
    check_world()
    me.mark(f"b is up-{me.rank}")
    me.wait_for("a has ended")
    dist.get_default_store().add("there", 10)
    check_world()
    assert dist.get_default_store().get("there") == b"22"
    dist.destroy_process_group()


def interrupt_joins(me: Me, at: Place) -> None:
    """Ctrl-C ends the join of rank 0, which is there alone, and then that of rank 1."""
    for number in (0, 1):
        if me.rank == number:
            before = [Counter(each) for each in me.resources()]
            me.interrupt_when_waiting()
            raised = me.attempt(at.join, number)
            assert raised["error"] == "KeyboardInterrupt", raised
            assert raised["seconds"] < SOON, raised

            def has_ended(before: list[Counter[str]] = before) -> bool:  # one of those before may have ended, too
                return all(Counter(now) <= then for now, then in zip(me.resources(), before, strict=True))

            with contextlib.suppress(AssertionError):
                wait_until(has_ended, "all threads of the join to end", 60.0)
            assert has_ended(), f"{before} became {me.resources()}"
            me.mark(f"interrupted-{number}")
        me.wait_for(f"interrupted-{number}")
    at.work(me.rank)


def start_again(me: Me, at: Place) -> None:
    """A world of rank 0 alone, in another process, was killed with its gateway before."""
    at.work(me.rank)


def die(me: Me, place: list[Any]) -> None:
    Place(*place).join(0, 1)
    os.kill(os.getpid(), signal.SIGKILL)


MAIN = "tcp file store gateway"
EVERY = "tcp file store gateway agents URL environment handler multicast"
EVENTS: dict[str, tuple[Callable[[Me, Place], None], str]] = {
    "again and again": (join_again, EVERY),
    "rank 0 late": (wait_for_rank_0, f"{MAIN} multicast"),
    "no working directory": (leave_working_directory, "tcp"),
    "one missing": (miss_rank_2, MAIN),
    "a rank twice": (partial(come_twice, rank=1), MAIN),
    "one too many": (partial(come_twice, rank=-1), "tcp file gateway multicast"),
    "ranks left out": (leave_ranks_out, "tcp file gateway multicast"),
    "another world size": (call_for_another_size, MAIN),
    "another token": (have_another_token, "tcp file store"),
    "other settings": (have_other_settings, "tcp gateway"),
    "a rank lingers": (begin_while_rank_2_lingers, MAIN),
    "two jobs": (be_two_jobs, MAIN),
    "Ctrl-C": (interrupt_joins, "tcp file store gateway multicast"),
    "restart": (start_again, "tcp file store"),
}
"""What happens, and by which methods it is tried."""
CELLS = [
    ("again and again", "tcp over IPv6"),
    ("again and again", "multicast over IPv6"),
    *((event, method) for event, (_, methods) in EVENTS.items() for method in methods.split()),
]


def meet(me: Me, event: str, place: list[Any]) -> None:
    """Take part in an event as one of three processes."""
    EVENTS[event][0](me, Place(*place))
