"""Ranks, stores, the gateway and the launcher where descriptors run out: one error that names the limit, no hang."""

from __future__ import annotations

import errno
import gc
import os
import re
import resource
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from support.hosting import embedded_only
from support.processes import DEADLINE, Me, Ranks, wait_until
from support.slow_ranks import allow_slow_ranks

import rankmesh as dist
from rankmesh._rendezvous.hosted import HostedGateway
from rankmesh._session.session import require_session
from rankmesh_agent.progress import wait_graph

pytestmark = pytest.mark.processes


def leave_spare(spare: int) -> None:
    """Leave this process so many descriptors that it may still open."""
    used = max(map(int, os.listdir("/proc/self/fd")))  # the highest is the listing's
    while (copy := os.dup(0)) < used:
        pass  # fills a gap
    os.close(copy)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, used + spare))


def assert_names_limit(text: str) -> None:
    for word in ("file descriptor", "RLIMIT_NOFILE is", "hard limit", "in use", "ulimit -n"):
        assert word in text, text


def assert_limit_error(reported: dict[str, Any]) -> None:
    assert "DistNetworkError" in reported["is"], reported
    assert_names_limit(reported["text"])


# Ranks


def join_without_descriptors(me: Me, victim: int, spare: int) -> None:
    if me.rank == victim:
        leave_spare(spare)
    reported = me.attempt(me.init, timeout=60 if me.rank == victim else 8)  # it meets its limit, however slow it is
    me.report(**reported)
    if reported["error"] is None:
        me.report(**me.attempt(dist.all_reduce, np.ones(1)))
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("transport", "spare", "victim"),
    [
        *(("shm", 0, 0), ("tcp", 5, 2), ("tcp", 10, 0), ("shm", 14, 2)),
    ],
)
def test_a_rank_cannot_join(ranks: Ranks, transport: str, victim: int, spare: int) -> None:
    """However far it comes; the others end, too, at once if they have met it."""
    environment = {"RANKMESH_TRANSPORT": transport}
    started = ranks.start(join_without_descriptors, 3, env=environment, victim=victim, spare=spare)
    ranks.wait(started)
    assert all(rank.code == 0 for rank in started), ranks.transcript()
    if started[victim].reported["error"] is not None:
        assert_limit_error(started[victim].reported)
        for rank in started:
            assert rank.reported["error"] is not None, ranks.transcript()
            assert "Traceback" not in rank.stderr, ranks.transcript()


def fail_before_the_connections(me: Me) -> None:
    if me.rank == 1:
        from rankmesh_agent import job_membership

        def no_engine(*arguments: object, **options: object) -> None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        job_membership.ProgressEngine = no_engine  # type: ignore[assignment, misc]
    me.report(**me.attempt(me.init, timeout=20))
    assert not [thread for thread in threading.enumerate() if thread.name == "rankmesh-heartbeat"]


@embedded_only("a standalone agent joins in another process")
def test_a_join_that_fails_before_the_connections_leaves_no_thread(ranks: Ranks) -> None:
    started = ranks.start(fail_before_the_connections, 3)
    ranks.wait(started)
    assert all(rank.code == 0 for rank in started), ranks.transcript()
    assert_limit_error(started[1].reported)
    for rank in (0, 2):
        assert started[rank].reported["ranks"] == [1], ranks.transcript()


def end_together(me: Me, others: Sequence[int]) -> None:
    """Have rank 0 keep its limit until others have waited, too."""
    if me.rank != 0:
        me.mark(f"waited-{me.rank}")
    else:
        me.wait_for(*(f"waited-{rank}" for rank in others))


def init_with_lasting_limits(me: Me, **options: Any) -> None:
    """Join; a report of a limit, of which there is one a second, counts longer: on a busy machine some are missing."""
    wait_graph._EXHAUSTED_SECONDS, wait_graph._EXHAUSTED_VALID_SECONDS = 5.0, 6.0
    me.init(**options)


def connect_to_rank_0() -> socket.socket:
    """Return a connection that rank 0 cannot accept."""
    url = urlsplit(require_session().agent.members[0].http)
    return socket.create_connection((url.hostname, url.port), 60)


def wait_for_a_rank_without_descriptors(me: Me, key: bool) -> None:
    """Rank 0 cannot accept rank 1: nothing of that is to be seen in what ranks 0 and 2 wait for."""
    if key:
        allow_slow_ranks()
    init_with_lasting_limits(me)
    store = dist.get_default_store()
    store.set(f"connected-{me.rank}", b"")
    me.limit_calls(5)
    me.meet("joined")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if me.rank == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        (me.folder / "full").mkdir()  # a mark without a descriptor
    me.wait_for("full")
    if me.rank == 1:
        with connect_to_rank_0():
            me.wait_for("waited-2")
    if not key:
        me.report(**me.attempt(dist.all_reduce, np.ones(1)))
        me.report(again=me.attempt(dist.all_reduce, np.ones(1)))
    elif me.rank != 1:
        me.report(**me.attempt(store.wait, ["key"], timedelta(seconds=5)))
    end_together(me, [1, 2] if key else [2])
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    me.meet("done")


@embedded_only("the limit is one of the agent's process")
@pytest.mark.parametrize("key", [False, True])
def test_a_rank_at_its_limit_is_the_cause_of_a_timeout(ranks: Ranks, key: bool) -> None:
    started = ranks.start(wait_for_a_rank_without_descriptors, 3, env={"RANKMESH_TRANSPORT": "tcp"}, key=key)
    ranks.wait(started)
    assert all(rank.code == 0 for rank in started), ranks.transcript()
    for rank in (started[0], started[2]):
        assert rank.reported["ranks"] == [0], ranks.transcript()
        assert key or rank.reported["again"]["ranks"] == [0], ranks.transcript()
        assert not key or "StoreTimeoutError" in rank.reported["is"], ranks.transcript()
        assert_names_limit(rank.reported["text"])


def wait_for_a_gateway_without_descriptors(me: Me) -> None:
    init_with_lasting_limits(me, init_method=f"file://{me.folder}/gateway")
    me.meet("joined")
    pid = hosted_gateway()
    if pid:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 3))
        me.mark(f"limited-by-{me.rank}")
    wait_until(lambda: [*me.folder.glob("limited-by-*")], "the gateway's limit", DEADLINE)
    store = dist.get_default_store()
    store.set_timeout(timedelta(seconds=5))
    me.report(hosts=bool(pid), **me.attempt(store.set, "key", b""))
    me.meet("done")


def hosted_gateway() -> int:
    """Return the process id of the gateway if this rank has started it, else 0."""
    hosted = [each for each in gc.get_objects() if type(each) is HostedGateway]
    return wait_until(lambda: hosted[0].pid, "the gateway's process", DEADLINE) if hosted else 0


@embedded_only("the limit is one of the agent's process")
def test_the_rank_whose_gateway_is_at_its_limit_is_named(ranks: Ranks) -> None:
    started = ranks.start(wait_for_a_gateway_without_descriptors, 3, env={"RANKMESH_TRANSPORT": "tcp"})
    ranks.wait(started)
    assert all(rank.code == 0 for rank in started), ranks.transcript()
    (host,) = [rank for rank, each in enumerate(started) if each.reported["hosts"]]
    for rank in started:
        assert "StoreUnresponsiveError" in rank.reported["is"], ranks.transcript()
        assert_names_limit(rank.reported["text"])
        assert rank.reported["ranks"] == [host], ranks.transcript()


def make_a_group_without_descriptors(me: Me) -> None:
    me.init(timeout=30)
    if me.rank == 1:
        leave_spare(0)
    reported = me.attempt(dist.new_group, [0, 1])
    me.report(**reported)
    if me.rank == 1:
        assert_limit_error(reported)
    me.report(**me.attempt(dist.barrier))


def test_a_group_cannot_be_made(ranks: Ranks) -> None:
    started = ranks.start(make_a_group_without_descriptors, 2, env={"RANKMESH_TRANSPORT": "shm"})
    ranks.wait(started)
    assert all(rank.code == 0 for rank in started), ranks.transcript()


def raised_limit(me: Me) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 512))
    me.init()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (512, 512)
    dist.destroy_process_group()


def test_a_rank_raises_its_limit(ranks: Ranks) -> None:
    ranks.run(raised_limit, 2)


# Stores


def use_store_without_descriptors(me: Me) -> None:
    if me.rank == 2:
        leave_spare(0)
        assert_limit_error(me.attempt(dist.TCPStore, "127.0.0.1", 0, 2, True, timeout=10))
    elif me.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, True, timeout=10)
        me.report(port=store.port)
        me.wait_for("full")
    else:
        me.wait_for("port")
        port = int((me.folder / "port").read_text())
        store = dist.TCPStore("127.0.0.1", port, None, False, timeout=10)
        store.set("key", b"value")
        spare = os.open(os.devnull, os.O_RDONLY)
        leave_spare(0)
        other = me.attempt(dist.TCPStore, "127.0.0.1", port, None, False, timeout=60)
        assert_limit_error(other)
        assert other["seconds"] < 30
        assert store.get("key") == b"value"
        os.close(spare)
        me.mark("full")


def test_a_store_and_its_clients(ranks: Ranks) -> None:
    started = ranks.start(use_store_without_descriptors, 3)
    wait_until(lambda: "port" in started[0].reported or started[0].code is not None, "the store", DEADLINE)
    assert "port" in started[0].reported, ranks.transcript()
    (ranks.folder / "port.new").write_text(str(started[0].reported["port"]))
    (ranks.folder / "port.new").rename(ranks.folder / "port")
    ranks.succeed(started)


# Servers


def test_a_gateway_goes_on_when_clients_leave(ranks: Ranks) -> None:
    """At its limit it serves nobody more, says so once, and does not use up a core; then it goes on."""
    gateway = ranks.launch(
        [sys.executable, "-c", f"{LIMITED}; from rankmesh_gateway.__main__ import main; sys.exit(main(['--port=0']))"],
        name="gateway",
    )
    wait_until(lambda: "ready at" in gateway.stdout or gateway.code is not None, "the gateway", DEADLINE)
    port = int(re.findall(r":(\d+)", gateway.stdout)[0])
    assert b"200" in ask(port)
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(80)]
    wait_until(lambda: "descriptor" in gateway.stderr, "the warning", DEADLINE)
    for client in clients:
        client.close()
    wait_until(lambda: b"200" in ask(port), "an answer", DEADLINE)
    assert gateway.stderr.count("RLIMIT_NOFILE") == 1, gateway
    assert_names_limit(gateway.stderr)
    assert "Traceback" not in gateway.stderr, gateway
    gateway.kill(signal.SIGTERM)
    ranks.wait([gateway])


LIMITED = "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))"


def ask(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), DEADLINE) as client:
        client.sendall(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        return client.recv(100)


def test_the_launcher_cannot_start_its_ranks(ranks: Ranks) -> None:
    code = f"{LIMITED}; from rankmesh.launch import main; sys.exit(main(['--nproc-per-node=40', '-m', 'this']))"
    launcher = ranks.launch([sys.executable, "-c", code], name="launcher")
    ranks.wait([launcher])
    assert launcher.code == 2, launcher
    assert_names_limit(launcher.stderr)
    assert "Traceback" not in launcher.stderr, launcher
    assert len(launcher.stderr.splitlines()) == 1, launcher


def test_ranks_start_with_the_limit_that_the_launcher_was_started_with(ranks: Ranks) -> None:
    limit = "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 512))"
    shown = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    (ranks.folder / "shown.py").write_text(shown)
    code = f"{limit}; from rankmesh.launch import main; sys.exit(main(['shown.py']))"
    launcher = ranks.launch([sys.executable, "-c", code], name="launcher")
    ranks.wait([launcher])
    assert "(128, 512)" in launcher.stdout, launcher
