"""The launchers of a job on several nodes, and what they agree on."""

from __future__ import annotations

import threading

import pytest
from support.gateway_requests import Clock

from rankmesh_agent.wire.schemas import FAILED_SECONDS, STARTING, SUSPECT_SECONDS, LauncherHeartbeat
from rankmesh_gateway.state import launchers as module
from rankmesh_gateway.state.launchers import LauncherRegistry
from rankmesh_gateway.state.validation import GatewayFullError, InvalidRequestError


class Job:
    def __init__(self, nodes: int = 2, most: int = 2) -> None:
        self.clock = Clock()
        self.table = LauncherRegistry(self.clock, threading.Lock())
        self.nodes, self.most = nodes, most

    def beat(self, node: int, attempt: int = 0, state="running", *, life: int = 1) -> tuple[int, bool]:
        beat = LauncherHeartbeat("job", node, self.nodes, f"n{node}-{life}", attempt, state, self.most)
        reply = self.table.heartbeat(beat)
        return reply.attempt, reply.over


@pytest.fixture
def job() -> Job:
    return Job()


def test_the_first_failure_of_an_attempt_restarts_the_job(job):
    assert job.beat(0) == job.beat(1) == (0, False)
    assert job.beat(1, 0, "failed") == (1, False)
    assert job.beat(0, 0, "failed") == (1, False), "of the same attempt"
    assert job.beat(0, 1) == (1, False)
    assert job.beat(0, 1, "failed") == (2, False)
    assert job.beat(1, 1) == (2, False)


def test_the_restarts_are_used_up(job):
    job.beat(0)
    job.beat(1, 2)
    assert job.beat(1, 2, "failed") == (2, True)
    assert not job.table.all_know_end("job")
    assert job.beat(0, 1) == (2, True)
    assert job.table.all_know_end("job")


def test_all_nodes_have_ended(job):
    assert job.beat(0, 0, "ended") == (0, False)
    assert job.beat(1) == (0, False)
    assert job.beat(1, 0, "ended") == (0, True)
    assert job.beat(0, 0, "ended") == (0, True)


def test_a_node_that_has_ended_is_part_of_the_next_attempt(job):
    job.beat(0, 0, "ended")
    job.beat(1, 0, "failed")
    assert job.beat(0, 0, "ended") == (1, False)
    assert job.beat(1, 1, "ended") == (1, False), "node 0 has not, in this attempt"


@pytest.mark.parametrize("known", [True, False])
def test_a_silent_launcher_is_not_waited_for_after_the_end_of_the_others(job, known):
    if known:
        job.beat(1)
    job.clock.advance(2 * FAILED_SECONDS)
    assert job.beat(0) == (0, False), "silence alone is no failure"
    assert job.beat(0, 0, "ended") == (0, False)
    job.clock.advance(FAILED_SECONDS - 1)
    assert job.beat(0, 0, "ended") == (0, False)
    job.clock.advance(1)
    assert job.beat(0, 0, "ended") == (0, True)


def test_a_signal_ends_the_job_for_all(job):
    job.beat(0)
    assert job.beat(1, 0, "stopped") == (0, True)
    assert job.beat(0, 0, "failed") == (0, True), "no restart"
    assert job.table.all_know_end("job")


def test_who_is_silent_need_not_know_the_end(job):
    job.beat(0)
    job.clock.advance(SUSPECT_SECONDS + 1)
    job.beat(1, 0, "stopped")
    assert job.table.all_know_end("job")
    assert job.table.all_know_end("another")


def test_a_launcher_that_is_replaced_has_failed(job):
    job.beat(0)
    job.beat(1)
    assert job.beat(1, STARTING, life=2) == (1, False)
    assert job.beat(0) == (1, False)


def test_a_launcher_that_comes_back_after_the_restart_joins_it(job):
    job.beat(1)
    job.beat(0, 0, "failed")
    assert job.beat(1, STARTING, life=2) == (1, False)
    assert job.beat(1, 1, life=2) == (1, False)


def test_a_gateway_that_was_started_anew_learns_the_attempt(job):
    assert job.beat(0) == (0, False)
    assert job.beat(1, 1) == (1, False)
    assert job.beat(0) == (1, False)


@pytest.mark.parametrize(("nodes", "node", "attempt"), [(2, 2, 0), (0, 0, 0), (2, -1, 0), (2, 0, -2)])
def test_invalid_values(job, nodes, node, attempt):
    job.nodes = nodes
    with pytest.raises(InvalidRequestError):
        job.beat(node, attempt)


def test_jobs_without_live_launchers_make_room(job, monkeypatch):
    monkeypatch.setattr(module, "MAX_JOBS", 1)
    job.beat(0)
    other = LauncherHeartbeat("other", 0, 2, "x", 0, "running", 0)
    with pytest.raises(GatewayFullError):
        job.table.heartbeat(other)
    job.clock.advance(FAILED_SECONDS)
    job.table.heartbeat(other)
