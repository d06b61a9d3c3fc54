"""Worlds whose ranks connect on demand: RANKMESH_FULL_MESH says up to how many ranks connect at the join."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
from support.processes import Me, Ranks, on_ranks, wait_until

import rankmesh as dist
from rankmesh._session.session import require_session
from rankmesh_agent.agent import Agent
from rankmesh_agent.progress import connector, outgoing

pytestmark = pytest.mark.processes

SIZE = 8
ON_DEMAND = {"RANKMESH_FULL_MESH": "0", "RANKMESH_TRANSPORT": "{transport}"}
FAR = 3
"""Distance of two ranks that are not neighbours among eight; their other neighbours are at distances 1 and 4."""


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@on_ranks(SIZE, env=ON_DEMAND)
def test_both_ranks_of_every_pair_may_send_first(me: Me) -> None:
    me.init()
    others = [rank for rank in range(SIZE) if rank != me.rank]
    received = {rank: np.empty(1 << 20 if abs(rank - me.rank) == FAR else 1000) for rank in others}
    works = [dist.isend(np.full(received[rank].size, float(me.rank)), rank) for rank in others]
    works += [dist.irecv(received[rank], rank) for rank in others]
    for work in works:
        work.wait()
    assert all((array == rank).all() for rank, array in received.items())
    assert sorted(require_session().agent.engine.transports()) == others  # type: ignore[union-attr]


@on_ranks(SIZE, env=ON_DEMAND | {"RANKMESH_TRANSPORT": "shm"})
def test_a_first_message_leaves_while_its_receiver_makes_no_call(me: Me) -> None:
    me.init()
    if me.rank == 0:
        dist.send(np.arange(3.0), FAR)
        me.mark("sent")
    if me.rank == FAR:
        me.wait_for("sent")
        got = np.empty(3)
        dist.recv(got, 0)
        assert got.tolist() == [0, 1, 2]
    dist.barrier()


@on_ranks(SIZE, env=ON_DEMAND | {"RANKMESH_TRANSPORT": "shm"})
def test_who_waits_for_a_rank_that_has_left_is_told(me: Me) -> None:
    me.init()
    if me.rank == FAR:
        dist.destroy_process_group()
        me.mark("left")
    if me.rank == 0:
        me.wait_for("left")
        with pytest.raises(dist.DistBackendError, match=f"rank {FAR} .*left"):
            dist.recv(np.empty(3), FAR)
        with pytest.raises(dist.DistBackendError, match=f"rank {FAR} .*left"):
            dist.send(np.empty(1 << 20), FAR)
        me.mark("told")
    me.wait_for("told")


@on_ranks(SIZE, env=ON_DEMAND | {"RANKMESH_TRANSPORT": "tcp"})
def test_who_waits_for_a_rank_that_has_left_a_group_is_told(me: Me) -> None:
    """Rank 1 connects to it only then, on a machine that is not busy."""
    me.init()
    group = dist.new_group(range(SIZE))
    if me.rank == 1 + FAR:
        dist.destroy_process_group(group)
        me.mark("left")
    if me.rank == 1:
        me.wait_for("left")
        with pytest.raises(dist.DistBackendError, match=f"rank {1 + FAR} .*left the group"):
            dist.recv(np.empty(3), 1 + FAR, group=group, timeout=10)
        me.mark("told")
    me.wait_for("told")


@on_ranks(SIZE, env=ON_DEMAND | {"RANKMESH_TRANSPORT": "tcp"})
def test_who_left_in_order_has_not_failed_although_its_goodbye_is_read_late(me: Me) -> None:
    me.init()
    agent = require_session().agent
    assert isinstance(agent, Agent)
    me.meet("joined")
    if me.rank == FAR:
        me.wait_for("held up")
        dist.destroy_process_group()
    elif me.rank == FAR + 1:
        agent.engine.driven = True  # as if a thread moved other bytes
        me.mark("held up")
        wait_until(lambda: FAR in agent._liveness._reported, "the end of the connection")
        agent.engine.driven = False
        dist.send(np.ones(3), FAR + 2)
    elif me.rank == FAR + 2:  # no neighbour of rank 3
        dist.recv(np.empty(3), FAR + 1)
        assert agent.group_registry.failures.first() is None
    me.meet("done")


def wait_until_killed(me: Me) -> None:
    """Rank 0 waits for rank 2, which makes no call, and has never talked to rank 3, which is killed."""
    me.init()
    me.meet("joined")
    if me.rank == 0:
        me.report(**me.attempt(dist.recv, np.empty(3), 2))
        me.mark("named")
    me.wait_for("named")
    os._exit(0)


def test_a_death_is_named_at_ranks_that_never_talked_to_the_dead_one(ranks: Ranks) -> None:
    started = ranks.start(wait_until_killed, SIZE, env={"RANKMESH_FULL_MESH": "0", "RANKMESH_TRANSPORT": "tcp"})
    ranks.wait_for(*(f"joined-{rank}" for rank in range(SIZE)))
    started[FAR].kill()
    ranks.wait(started)
    reported = started[0].reported
    assert reported["error"] == "RankFailedError", reported["text"]
    assert f"rank {FAR} (" in reported["text"]
    assert f"pid {started[FAR].pid}" in reported["text"]


def receive_from_stopped(me: Me) -> None:
    """Rank 0 dials rank 3, which is stopped, until an attempt has no time left."""
    me.init()
    outgoing.DIAL_SECONDS = connector.DIAL_SECONDS = 0.2
    me.meet("joined")
    if me.rank == 0:
        me.wait_for("stopped")
        got = np.zeros(3)
        work = dist.irecv(got, FAR)
        (thread,) = (each for each in threading.enumerate() if isinstance(each, connector.Connector))
        engine = require_session().agent.engine  # type: ignore[union-attr]

        def attempted() -> bool:
            early = engine.is_connected(FAR)  # on a busy machine, a wait of the start connects them
            return early or any(each.rounds > 1 for each in list(thread._outgoing.values()))

        wait_until(attempted, "an attempt")
        me.mark("tried")
        work.wait()
        assert got.tolist() == [1, 1, 1]
    if me.rank == FAR:
        os.kill(os.getpid(), signal.SIGSTOP)
        dist.send(np.ones(3), 0)
    me.meet("done")


def test_a_stopped_rank_is_waited_for(ranks: Ranks) -> None:
    started = ranks.start(receive_from_stopped, SIZE, env={"RANKMESH_FULL_MESH": "0"})
    ranks.wait_for(*(f"joined-{rank}" for rank in range(SIZE)))
    state = Path(f"/proc/{started[FAR].pid}/stat")
    wait_until(lambda: state.read_text().rpartition(") ")[2].startswith("T"), "the stop")
    ranks.mark("stopped")
    ranks.wait_for("tried")
    started[FAR].kill(signal.SIGCONT)
    ranks.succeed(started)


def tcp_sockets() -> list[int]:
    """Return the descriptors of TCP sockets."""
    found = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if socket.socket(fileno=os.dup(fd)).family == socket.AF_INET:
                found.append(fd)
    return found


def child_of_fork(me: Me) -> None:
    me.init()
    pid = os.fork()
    if not pid:
        os._exit(1 if tcp_sockets() and me.rank else 0)  # rank 0 hosts the gateway
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_forked_child_has_none_of_the_sockets(ranks: Ranks) -> None:
    ranks.run(child_of_fork, 6, env={"RANKMESH_FULL_MESH": "0"})
