"""Launchers of a job on several nodes: their clients and the gateway's registry; the clock and the ranks are made up.

The model has what becomes of an attempt; tests/gateway/state/test_launchers.py has the texts, and limits.
"""

from __future__ import annotations

import os
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.gateway_requests import Clock

from rankmesh._launcher import node_rendezvous as module
from rankmesh._launcher.node_rendezvous import NodeRendezvous, RendezvousError
from rankmesh_agent.membership.gateway_client import UnavailableError
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.wire.schemas import FAILED_SECONDS, NO_NODE, STARTING, LauncherHeartbeat
from rankmesh_gateway.state.launchers import LauncherRegistry

LAST_CALL = 2.0
SETTLED = int(FAILED_SECONDS + LAST_CALL) + 4
"""Seconds after which a silent launcher has been noticed, and the attempt after it has begun."""
RUNNING = ("running", "crashed")


class Node:
    """A launcher, and how its ranks are: waiting for a start, running, crashed, failed, ended, or over with the job."""

    def __init__(self, client: NodeRendezvous, asked: int, hosts_gateway: bool) -> None:
        self.client, self.asked, self.hosts_gateway = client, asked, hosts_gateway
        self.ranks = "waiting"
        self.number, self.attempt, self.restarts = NO_NODE, STARTING, 0

    def report(self, state: Any) -> None:
        self.ranks = state
        self.client.report(state)
        self.client._exchange()


class Launchers(RuleBasedStateMachine):
    """Each rule disturbs a job that has settled, in a few ways at once, and lets it settle again."""

    def __init__(self) -> None:
        super().__init__()
        self.clock, self.nodes = Clock(), list[Node]()
        self.ready = os.eventfd(1)
        self.patch = pytest.MonkeyPatch()
        gateway = SimpleNamespace(read=self.deliver, url="", locate=lambda: None, close=lambda: None)
        self.patch.setattr(module, "GatewayClient", lambda *_: gateway)
        self.patch.setattr(NodeRendezvous, "_send_heartbeats", lambda _: None)
        self.losing = self.unknown = False
        self.gateway_ends: tuple[int, int] | None = None
        self.keeps_numbers = True

    @initialize(
        nodes=st.sampled_from([(1, 1), (2, 2), (3, 3), (1, 2), (1, 3), (2, 3)]),
        most_restarts=st.integers(0, 9),
        gateway=st.booleans(),
    )
    def begin(self, nodes: tuple[int, int], most_restarts: int, gateway: bool) -> None:
        self.least, self.most = nodes
        self.elastic, self.most_restarts = self.least < self.most, most_restarts
        self.registry = LauncherRegistry(self.clock, threading.Lock())
        self.attempt = -1
        self.start_job(gateway, 0)

    def start_job(self, gateway: bool, late: int) -> None:
        self.attempt, self.restarts, self.over = self.attempt + 1, 0, ""
        self.size, self.has_end, self.unknown = 0, False, False
        self.begun, self.killed = dict[int, tuple[int, int]](), dict[int, Node]()
        for number in range(max(1, self.least - late)):
            self.start(number, hosts_gateway=gateway and number == 0)
        self.settle(random.Random(0))

    def start(self, number: int, *, hosts_gateway: bool = False) -> Node:
        beat = LauncherHeartbeat(
            *("job", NO_NODE if self.elastic else number, self.most, "", STARTING, "waiting", self.most_restarts),
            min_nodes=self.least,
            nproc=2,
            last_call=LAST_CALL,
            hosts_gateway=hosts_gateway,
        )
        node = Node(NodeRendezvous(beat, "http://gateway", "token"), number, hosts_gateway)
        self.nodes.append(node)
        return node

    def deliver(self, kind: Any, path: str, beat: LauncherHeartbeat) -> Any:
        reply = self.registry.heartbeat(beat)
        assert reply.restarts <= self.most_restarts
        if self.losing and beat.state != "ended":
            raise UnavailableError("the reply is lost")
        return reply

    def step(self, node: Node) -> None:
        """Exchange a heartbeat, and have the launcher do what follows from it."""
        client = node.client
        client._exchange()
        has_run = node.ranks == "failed" or (node.ranks in RUNNING and client.must_end)
        if has_run or (node.ranks == "ended" and client.is_decided):
            node.ranks = "over" if client.is_over else "waiting"
        if node.ranks != "waiting":
            return
        try:
            place = client.join(Deadline(0), print, self.ready)
        except RendezvousError:
            assert not client.refusal
            return
        if place is not None:
            self.check_place(node, place)
            node.ranks = "running"
            node.number, node.attempt, node.restarts = place.node, place.attempt, place.restarts
        elif client.latest.over:
            node.ranks = "over"

    def check_place(self, node: Node, place: Any) -> None:
        """The nodes of an attempt agree on it; each has a number of its own, that of the attempt before if it can."""
        assert place.attempt > node.attempt
        assert self.begun.setdefault(place.attempt, (place.nodes, place.restarts)) == (place.nodes, place.restarts)
        assert self.least <= place.nodes <= self.most
        assert 0 <= place.node < place.nodes
        assert place.node not in [each.number for each in self.nodes if each.attempt == place.attempt]
        if self.elastic and node.hosts_gateway:
            assert place.node == 0
        if not self.elastic:
            assert place.node == node.asked
        elif self.keeps_numbers and node.attempt == place.attempt - 1 and node.number in range(place.nodes):
            assert place.node == node.number

    def settle(self, order: random.Random, losses: int = 0) -> None:
        self.run_on(order, losses)
        self.check()

    def run_on(self, order: random.Random, losses: int = 0) -> None:
        for second in range(SETTLED):
            self.losing = second < losses
            for number, node in enumerate(order.sample(self.nodes, len(self.nodes))):
                if (second, number) == self.gateway_ends:
                    self.start_the_gateway()
                self.step(node)
            self.clock.advance(1)

    def check(self) -> None:
        """The launchers are as the model has them."""
        if self.over:
            assert {node.ranks for node in self.nodes} <= {"over"}
            assert {node.client.latest.failed for node in self.nodes} <= {self.over == "failed"}
            assert self.registry.all_know_end("job")
            return
        if not self.size and len(self.nodes) >= self.least:
            self.size = min(len(self.nodes), self.most)
        if self.size:
            assert self.begun[self.attempt] == (self.size, self.restarts)
        assert {node.client.latest.attempt for node in self.nodes} <= {self.attempt}
        assert {node.ranks for node in self.members()} <= {"running", "ended"}
        assert {node.ranks for node in self.nodes if node not in self.members()} <= {"waiting"}

    def members(self) -> list[Node]:
        return [node for node in self.nodes if node.attempt == self.attempt]

    @precondition(lambda self: self.over)
    @rule(gateway=st.booleans(), late=st.integers(0, 1))
    def start_the_next_run(self, gateway: bool, late: int) -> None:
        for node in [*self.nodes]:
            self.remove(node)
        self.clock.advance(FAILED_SECONDS)
        self.start_job(gateway, late)

    @precondition(lambda self: not self.over and self.nodes)
    @rule(seed=st.integers(0, 99), losses=st.integers(0, 2))
    def lose_the_gateway(self, seed: int, losses: int) -> None:
        """A new one learns what the launchers know."""
        self.start_the_gateway()
        self.has_end = any(node.ranks == "ended" for node in self.members())
        lacks_nodes = len(self.members()) < self.size
        if not self.size:
            self.attempt += 1  # this one may have begun on some nodes
            self.restarts = max(node.restarts for node in self.nodes)
        elif self.has_end:
            pass
        elif (lacks_nodes or self.size < self.most) and any(node.ranks == "waiting" for node in self.nodes):
            self.begin_attempt()
        elif lacks_nodes and self.elastic:
            self.fail_attempt()
        self.settle(random.Random(seed), losses)

    def start_the_gateway(self) -> None:
        self.registry = LauncherRegistry(self.clock, threading.Lock())
        self.unknown = self.unknown or bool(self.killed)
        self.killed.clear()

    @precondition(lambda self: not self.over and not self.has_end and self.restarts + 2 < self.most_restarts)
    @precondition(lambda self: not any(node.hosts_gateway for node in self.nodes))
    @rule(
        event=st.sampled_from(["fail", "crash", "kill", "join", "none"]),
        number=st.integers(0, 2),
        seed=st.integers(0, 99),
        moment=st.tuples(st.integers(0, 3), st.integers(0, 2)),
    )
    def lose_the_gateway_meanwhile(self, event: str, number: int, seed: int, moment: tuple[int, int]) -> None:
        """The new one may not know of a failure, or who had which number; but all nodes go on together."""
        self.joined = self.lost = False
        if event != "none" and self.nodes:
            getattr(self, event)(self.nodes[number % len(self.nodes)] if event != "join" else number)
        while len(self.nodes) < self.least:
            self.join(0)
        order, self.gateway_ends, self.keeps_numbers = random.Random(seed), moment, False
        self.run_on(order)
        self.gateway_ends = None
        self.run_on(order)
        self.keeps_numbers = True
        self.attempt = max(node.client.latest.attempt for node in self.nodes)
        self.size, self.restarts = self.begun[self.attempt]
        self.unknown = False
        assert len(self.members()) == self.size == min(len(self.nodes), self.most)
        self.check()

    @precondition(lambda self: not self.over)
    @rule(
        events=st.lists(
            st.tuples(
                st.sampled_from(["fail", "crash", "end", "end", "stop", "kill", "join", "join"]), st.integers(0, 3)
            ),
            min_size=1,
            max_size=3,
        ),
        seed=st.integers(0, 99),
        losses=st.integers(0, 2),
    )
    def disturb(self, events: list[tuple[str, int]], seed: int, losses: int) -> None:
        self.joined, self.lost = False, False
        for kind, number in events:
            if kind == "join":
                self.join(number)
            elif self.nodes:
                getattr(self, kind)(self.nodes[number % len(self.nodes)])
            ends = self.has_end and not any(node.ranks in RUNNING for node in self.members())
            if ends and not self.over:
                self.over = "ended"
            if self.over:
                break
        else:
            if any(node.ranks == "crashed" for node in self.members()) or (self.lost and not self.has_end):
                self.fail_attempt()
        self.settle(random.Random(seed), losses)

    def fail_attempt(self) -> None:
        """The first failure of an attempt uses a restart, if there is one."""
        if self.restarts == self.most_restarts:
            self.over = "failed"
        else:
            self.restarts += 1
            self.begin_attempt()

    def begin_attempt(self) -> None:
        self.attempt, self.size, self.has_end, self.lost, self.unknown = self.attempt + 1, 0, False, False, False

    def fail(self, node: Node) -> None:
        if node.ranks == "running":
            node.report("failed")
            if node.attempt == self.attempt:
                self.fail_attempt()

    def crash(self, node: Node) -> None:
        """The ranks fail, and the report of that does not arrive."""
        if node.ranks == "running":
            node.client.report("waiting")
            node.ranks = "crashed"

    def end(self, node: Node) -> None:
        if node.ranks == "running":
            self.has_end = self.has_end or node.attempt == self.attempt
            node.report("ended")

    def stop(self, node: Node) -> None:
        if self.joined:
            return
        node.report("stopped")
        self.remove(node)
        if not self.elastic or node.hosts_gateway:
            self.over = "failed"
        elif node.attempt == self.attempt:
            self.fail_attempt()

    def kill(self, node: Node) -> None:
        """Without a report; of a node whose number no other one can have, this is a failure when it is replaced."""
        if not node.hosts_gateway and not self.joined and len(self.nodes) > 1:
            self.lost = self.lost or (self.elastic and node.attempt == self.attempt)
            self.remove(node)
            if not self.elastic:
                self.killed[node.asked] = node

    def remove(self, node: Node) -> None:
        self.nodes.remove(node)
        node.client.close()

    def join(self, number: int) -> None:
        missing = sorted(set(range(self.least)) - {node.asked for node in self.nodes})
        if not (len(self.nodes) <= self.most if self.elastic else missing):
            return
        node = self.start(number if self.elastic else missing[number % len(missing)])
        node.client._exchange()
        self.joined = True
        old = None if self.elastic else self.killed.pop(node.asked, None)
        if old is not None and old.ranks in RUNNING and old.attempt == self.attempt:
            self.fail_attempt()
        elif self.size and not self.has_end and (self.size < self.most if self.elastic else self.unknown):
            self.begin_attempt()

    def teardown(self) -> None:
        for node in [*self.nodes]:
            self.remove(node)
        os.close(self.ready)
        self.patch.undo()


TestLaunchers = pytest.mark.slow(Launchers.TestCase)
TestLaunchers.settings = settings(
    max_examples=100, stateful_step_count=12, derandomize=True, deadline=None, database=None
)
