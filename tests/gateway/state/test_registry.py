"""The registry beyond its model: errors' texts, closing, forgetting."""

from __future__ import annotations

import time
from concurrent.futures import CancelledError

import pytest

from rankmesh_agent.wire.errors import RankTakenError, WorldSizeMismatchError
from rankmesh_agent.wire.schemas import FAILED_SECONDS, JoinReply
from rankmesh_gateway.state import registry as registry_module
from rankmesh_gateway.state.epoch import JOIN_SILENCE_SECONDS
from rankmesh_gateway.state.registry import FORGET_SECONDS, JobNotFoundError, Registry
from rankmesh_gateway.state.validation import GatewayClosingError, GatewayFullError


def form(registry, ask, size=2, **how) -> JoinReply:
    """Complete a world; return its reply."""
    futures = [registry.join(ask.join(rank, size, **how)) for rank in range(size)]
    return futures[-1].result(timeout=0)


def test_a_late_join_of_the_attempt_before_is_refused(registry, ask):
    registry.restart("job", 1)
    with pytest.raises(RankTakenError, match=r"rank 0 \(host0, pid 100\) was started before restart 1 of job 'job'"):
        registry.join(ask.join(0))


class TestJoin:
    def test_the_reply(self, registry, ask):
        assert registry.join_status(ask.join(0, 3)) == JoinReply(False, "job", 1, 3, [], [0, 1, 2])
        assert registry.counts() == (0, 0)
        registry.join(ask.join_unassigned(8, 3))
        registry.join(ask.join(1, 3))
        status = registry.join_status(ask.join(1, 3))
        assert [(member.rank, member.instance) for member in status.members] == [(1, "r1-1"), (-1, "r8-1")]
        assert status.missing == [0, 2]
        reply = registry.join(ask.join_unassigned(9, 3)).result(timeout=0)
        assert [(member.rank, member.instance) for member in reply.members] == [(0, "r8-1"), (1, "r1-1"), (2, "r9-1")]
        assert registry.join_status(ask.join_unassigned(9, 3)) == reply


class TestErrors:
    def test_a_rank_that_is_taken(self, registry, ask, clock):
        form(registry, ask)
        clock.advance(FAILED_SECONDS - 0.1)
        with pytest.raises(RankTakenError, match=r"rank 1 \(host1, pid 101\) at http://10.0.0.1:9001") as caught:
            registry.join(ask.join(1, life=2))
        assert (caught.value.ranks, caught.value.address) == ((1,), "http://10.0.0.1:9001")
        with pytest.raises(RankTakenError, match="pid 101"):
            registry.heartbeat(ask.heartbeat(1, life=2))

    def test_a_rank_whose_holder_joins(self, registry, ask, clock):
        registry.join(ask.join(1)).cancel()
        clock.advance(JOIN_SILENCE_SECONDS)
        with pytest.raises(RankTakenError, match="free after 30 s of silence"):
            registry.join(ask.join(1, life=2))

    def test_all_ranks_are_taken(self, registry, ask):
        form(registry, ask)
        with pytest.raises(RankTakenError, match=r"all 2 ranks of job 'job' .* none left for process 108 on host8"):
            registry.join(ask.join_unassigned(8))

    def test_another_world_size(self, registry, ask):
        registry.join(ask.join(0, 2))
        with pytest.raises(
            WorldSizeMismatchError, match=r"rank 1 .* has 3 ranks, but rank 0 .* says 2\. .*WORLD_SIZE"
        ) as caught:
            registry.join(ask.join(1, 3))
        assert caught.value.address == "http://10.0.0.1:9000"
        registry.join(ask.join_unassigned(5, 2, job="other"))
        with pytest.raises(WorldSizeMismatchError, match=r"a process without a rank yet \(host5, pid 105\)") as caught:
            registry.join(ask.join(1, 3, job="other"))
        assert caught.value.ranks == ()


class TestClosing:
    def test_it_ends_waits_and_rejects_joins_and_heartbeats(self, registry, ask):
        waiting = registry.join(ask.join(0))
        registry.close()
        with pytest.raises(CancelledError):
            waiting.result(timeout=0)
        for rank in range(2):
            for call in (registry.join, registry.join_status):  # the second rank would complete the world
                with pytest.raises(GatewayClosingError, match="about to end"):
                    call(ask.join(rank))
        with pytest.raises(GatewayClosingError):
            registry.heartbeat(ask.heartbeat(0))

    def test_a_rank_of_a_complete_world_still_gets_the_reply(self, registry, ask):
        reply = form(registry, ask)
        registry.close()
        assert registry.join(ask.join(0)).result(timeout=0) == registry.join_status(ask.join(0)) == reply
        with pytest.raises(GatewayClosingError):
            registry.join(ask.join(0, life=2))

    def test_one_whose_host_has_left_admits_ranks_to_worlds_that_are_complete(self, registry, ask):
        """New worlds meet at the next gateway, whose address is published in its place."""
        for rank in range(2):
            registry.join(ask.join(rank))
        waiting = registry.join(ask.join(0, 3, job="other"))
        registry.refuse_worlds()
        assert waiting.cancelled()
        for job in ("other", "third", "job"):
            with pytest.raises(GatewayClosingError):
                registry.join(ask.join(1, 3, job=job, life=2))
        assert registry.join(ask.join(0)).result(0).complete
        registry.join(ask.waiting(7))
        assert all(registry.join(ask.growth(rank, 3)) for rank in range(2))
        assert [each.state for each in registry.jobs("job")][-1] == "running"

    def test_one_whose_host_has_gone_holds_no_ranks_for_worlds_that_linger(self, registry, ask):
        """They may be on hosts that have been cut off, and the job starts again at the same address."""
        form_again = [registry.join(ask.join(rank)) for rank in range(2)]
        assert form_again[0].done()
        with pytest.raises(RankTakenError):
            registry.join(ask.join(0, life=2))
        registry.release_ranks()
        assert all(registry.join(ask.join(rank, life=2)) for rank in range(2))
        assert registry.jobs("job")[-1].epoch == 2
        with pytest.raises(RankTakenError):
            registry.join(ask.join(0, life=3))


class TestForgetting:
    def test_a_job_that_is_long_over(self, registry, ask, clock):
        form(registry, ask)
        clock.advance(FORGET_SECONDS)
        registry.join(ask.join(0, job="other"))
        assert {info.job for info in registry.ranks()} == {"job", "other"}
        clock.advance(1)
        registry.join(ask.join(0, job="third"))
        assert {info.job for info in registry.ranks()} == {"other", "third"}

    def test_the_limit_forgets_the_job_that_is_over_longest(self, registry, ask, clock, monkeypatch):
        monkeypatch.setattr(registry_module, "MAX_JOBS", 3)
        for job in ("a", "b", "c"):
            registry.join(ask.join(0, 1, job=job))
            clock.advance(1)
        with pytest.raises(GatewayFullError, match="3 jobs"):
            registry.join(ask.join(0, 1, job="d"))
        for job in ("b", "a"):
            registry.leave(ask.leave(0, job=job))
            clock.advance(1)
        registry.join(ask.join(0, 1, job="d"))
        assert {info.job for info in registry.ranks()} == {"a", "c", "d"}


def test_each_registry_has_its_own_id():
    assert Registry().id != Registry().id


class TestJobs:
    def test_the_state_of_a_world(self, registry, ask, clock):
        def job():
            (found,) = registry.jobs()
            return found.state, found.ranks, found.world_size

        registry.join(ask.join(0, 2))
        assert job() == ("forming", {"joining": 1}, 2)
        clock.advance(5)
        registry.join(ask.join(1, 2))
        assert job() == ("running", {"alive": 2}, 2)
        clock.advance(1)
        assert registry.jobs()[0].since == pytest.approx(time.time() - 1, abs=1), "from its completion on"
        registry.leave(ask.leave(0, reason="exit code 1"))
        assert job() == ("failing", {"failed": 1, "alive": 1}, 2)
        clock.advance(FAILED_SECONDS)
        assert job() == ("failed", {"failed": 2}, 2)
        form(registry, ask, 1, job="orderly")
        registry.leave(ask.leave(0, job="orderly"))
        assert registry.jobs()[1].state == "ended"

    def test_members_of_the_latest_world(self, registry, ask):
        with pytest.raises(JobNotFoundError, match="no world of a job 'job' has come together"):
            registry.members("job")
        form(registry, ask)
        assert {rank: info.state for rank, info in registry.members("job").items()} == {0: "alive", 1: "alive"}
