"""The launchers of a job on several nodes: texts, limits, times; sdk/launcher/test_node_rendezvous.py has a model."""

from __future__ import annotations

import threading

import pytest
from support.gateway_requests import Clock

from rankmesh_agent.wire.errors import RankTakenError
from rankmesh_agent.wire.schemas import (
    FAILED_SECONDS,
    NO_NODE,
    STARTING,
    SUSPECT_SECONDS,
    LauncherHeartbeat,
    LauncherReply,
    LauncherState,
)
from rankmesh_gateway.state import launchers as module
from rankmesh_gateway.state.launchers import LauncherRegistry
from rankmesh_gateway.state.validation import GatewayFullError, InvalidRequestError


class Nodes:
    """Launchers of a job with ``--nnodes MIN:MAX``."""

    def __init__(self, least: int, most: int, *, restarts: int = 1, last_call: float = 2.0) -> None:
        self.clock = Clock()
        self.table = LauncherRegistry(self.clock, threading.Lock())
        self.options = {"min_nodes": least, "nodes": most, "max_restarts": restarts, "nproc": 2, "last_call": last_call}
        self.running: dict[str, LauncherReply] = {}

    def beat(self, name: str, state: LauncherState, **more: object) -> LauncherReply:
        own = {"node": NO_NODE, "attempt": STARTING, "host": f"host-{name}"}
        if name in self.running:
            known = self.running[name]
            own |= {"node": known.node, "attempt": known.attempt}
            own |= {"attempt_nodes": known.nodes, "restarts": known.restarts}
        return self.table.heartbeat(LauncherHeartbeat("job", instance=name, state=state, **self.options | own | more))

    def start(self, *names: str) -> list[LauncherReply]:
        """Have launchers wait until they are part of an attempt, and report then that its ranks run."""
        for name in names:
            self.beat(name, "waiting")
        self.clock.advance(self.options["last_call"])
        replies = [self.beat(name, "waiting") for name in names]
        self.running |= {name: reply for name, reply in zip(names, replies, strict=True) if reply.nodes}
        return [self.beat(name, "running" if name in self.running else "waiting") for name in names]

    def silence(self, *live: str, seconds: float = FAILED_SECONDS) -> LauncherReply:
        """Let time pass in which some launchers report that their ranks run."""
        for _ in range(int(seconds)):
            self.clock.advance(1)
            replies = [self.beat(name, "running") for name in live]
        return replies[-1]

    def change(self, attempt: int) -> tuple[str, list[int]] | None:
        with self.table._lock:
            return self.table.change_after("job", attempt, self.clock())


def place(reply: LauncherReply) -> tuple[int, int, int, int]:
    return reply.attempt, reply.node, reply.nodes, reply.restarts


def test_the_last_call_begins_with_the_minimum():
    nodes = Nodes(2, 4)
    nodes.beat("a", "waiting")
    nodes.clock.advance(2)
    assert nodes.beat("a", "waiting").missing == "1 of at least 2 node(s) are there: host-a"
    assert nodes.beat("b", "waiting").nodes == 0
    nodes.clock.advance(1.9)
    assert nodes.beat("b", "waiting").nodes == 0
    assert nodes.beat("c", "waiting").nodes == 0
    nodes.clock.advance(0.1)
    assert [place(nodes.beat(name, "waiting")) for name in "abc"] == [(0, number, 3, 0) for number in range(3)]


def test_no_last_call_is_waited_for_with_the_maximum():
    nodes = Nodes(1, 2)
    nodes.beat("a", "waiting")
    assert place(nodes.beat("b", "waiting")) == (0, 1, 2, 0)


def test_the_node_with_the_gateway_is_node_0():
    nodes = Nodes(2, 3, last_call=0)
    nodes.beat("a", "waiting", node=0)
    nodes.beat("b", "waiting", hosts_gateway=True)
    assert [nodes.beat(name, "waiting").node for name in "ab"] == [1, 0]


def test_a_node_that_joins_begins_an_attempt_but_uses_no_restart():
    nodes = Nodes(1, 3, restarts=0)
    nodes.start("a", "b")
    assert nodes.beat("c", "waiting").nodes == 0
    reply = nodes.beat("a", "running")
    assert (reply.attempt, reply.nodes, reply.restarts, reply.membership) == (1, 0, 0, True)
    assert reply.reason == "node host-c joins: the job starts again with 3 nodes"
    assert nodes.change(0) is None, "not all launchers know it yet"
    nodes.beat("b", "running")
    assert nodes.change(0) == (reply.reason, [])
    assert nodes.change(1) is None, "ranks of this attempt go on"
    assert nodes.beat("a", "waiting").missing == (
        "2 of at least 1 node(s) are there: host-c, node 0 (host-a); node 1 (host-b) end(s) the ranks of the attempt "
        "before"
    )
    nodes.clock.advance(1)
    assert nodes.beat("b", "failed").nodes == 0, "its ranks failed because of the change"
    assert [place(each) for each in nodes.start("a", "b", "c")] == [(1, number, 3, 0) for number in range(3)]


def test_the_ranks_of_torchruns_do_not_learn_of_changes():
    nodes = Nodes(1, 2)
    nodes.options["torchrun"] = True
    nodes.start("a", "b")
    nodes.beat("b", "stopped")
    assert nodes.beat("a", "running").reason == "node 1 (host-b) has left"
    assert nodes.change(0) is None, "new ranks of the next attempt would be taken for those of this one"


def test_a_node_that_is_lost_uses_a_restart_and_the_others_keep_their_numbers():
    nodes = Nodes(1, 4, restarts=2)
    nodes.start("a", "b", "c", "d")
    assert nodes.silence("a", "c", "d", seconds=FAILED_SECONDS - 1).attempt == 0
    reply = nodes.silence("a", "c", "d", seconds=1)
    assert (reply.attempt, reply.restarts, reply.over) == (1, 1, False)
    assert reply.reason == "node 1 (host-b) is lost: its launcher has been silent for 10 s"
    nodes.beat("a", "running")
    nodes.beat("c", "running")
    assert nodes.change(0) == (reply.reason, [2, 3])
    assert [place(each) for each in nodes.start("a", "c", "d")] == [(1, 0, 3, 1), (1, 2, 3, 1), (1, 1, 3, 1)]
    assert nodes.beat("b", "running").node == NO_NODE, "it comes back"
    nodes.running.pop("b")
    nodes.beat("b", "waiting")
    assert [place(each) for each in nodes.start("a", "b", "c", "d")] == [(2, number, 4, 1) for number in (0, 3, 2, 1)]


def test_a_failure_does_not_wait_for_the_silence_of_the_lost_node():
    nodes = Nodes(1, 2)
    nodes.start("a", "b")
    assert nodes.beat("a", "failed").attempt == 1
    nodes.clock.advance(SUSPECT_SECONDS)
    assert nodes.beat("a", "waiting").nodes == 0, "the other may live"
    nodes.clock.advance(0.5)
    assert place(nodes.beat("a", "waiting")) == (1, 0, 1, 1)
    assert nodes.change(0) is None, "a failure is no change of the nodes"


def test_a_lost_node_without_a_restart_left_ends_the_job():
    nodes = Nodes(1, 2, restarts=0)
    nodes.start("a", "b")
    reply = nodes.silence("a")
    assert (reply.over, reply.failed, reply.attempt) == (True, True, 0)
    assert nodes.change(0) == ("node 1 (host-b) is lost: its launcher has been silent for 10 s", [2, 3])
    assert nodes.table.all_know_end("job")


def test_a_stop_of_the_node_with_the_gateway_ends_the_job():
    nodes = Nodes(1, 2)
    nodes.beat("a", "waiting", hosts_gateway=True)
    nodes.start("a", "b")
    assert nodes.beat("a", "stopped", hosts_gateway=True).over
    reply = nodes.beat("b", "running")
    assert (reply.over, reply.failed, reply.reason) == (True, True, "the launcher of node 0 (host-a) was stopped")


def test_a_node_that_does_not_report_to_a_gateway_that_was_started_again():
    nodes = Nodes(1, 2)
    nodes.start("a", "b")
    nodes.table = LauncherRegistry(nodes.clock, threading.Lock())
    assert nodes.silence("a").attempt == 0
    reply = nodes.silence("a", seconds=1)
    assert (reply.attempt, reply.restarts) == (1, 1)
    assert reply.reason == "node 1 is lost: its launcher has been silent for 10 s"
    assert nodes.change(0) == (reply.reason, [2, 3])


def test_the_silence_of_a_gateway_that_was_suspended_is_no_loss():
    nodes = Nodes(1, 2)
    nodes.start("a", "b")
    nodes.clock.advance(60)
    with nodes.table._lock:
        nodes.table.excuse(60)
    assert nodes.beat("a", "running").attempt == 0


@pytest.mark.parametrize("option", [{"nodes": 4}, {"min_nodes": 2}, {"nproc": 3}, {"max_restarts": 5}])
def test_launchers_have_the_same_options(option):
    nodes = Nodes(1, 3)
    nodes.beat("a", "waiting")
    with pytest.raises(InvalidRequestError, match=r"host-b, has --nnodes .*; start all with the same options"):
        nodes.beat("b", "waiting", **option)


def test_a_launcher_whose_node_number_another_one_has_taken():
    nodes = Nodes(2, 2)
    nodes.beat("a", "waiting", node=0)
    nodes.beat("b", "waiting", node=0)
    with pytest.raises(RankTakenError, match="another launcher has come as node 0"):
        nodes.beat("a", "waiting", node=0)
    assert nodes.beat("b", "waiting", node=0).missing == "1 of 2 node(s) are there: node 0 (host-b); missing: node 1"


@pytest.mark.parametrize(("most", "node", "attempt"), [(2, 2, 0), (0, 0, 0), (2, -1, 0)])
def test_invalid_values(most, node, attempt):
    with pytest.raises(InvalidRequestError):
        Nodes(0, most).beat("a", "running", node=node, attempt=attempt)


def test_jobs_without_live_launchers_make_room(monkeypatch):
    monkeypatch.setattr(module, "MAX_JOBS", 1)
    nodes = Nodes(1, 2)
    nodes.beat("a", "waiting")
    other = LauncherHeartbeat("other", 0, 2, "x", 0, "running", 0)
    with pytest.raises(GatewayFullError):
        nodes.table.heartbeat(other)
    nodes.clock.advance(FAILED_SECONDS)
    nodes.table.heartbeat(other)
