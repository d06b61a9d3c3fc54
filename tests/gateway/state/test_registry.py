"""Who gets into which world, and who does not."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError, wait

import pytest

from rankmesh_agent.wire.errors import RankTakenError, WorldSizeMismatchError
from rankmesh_agent.wire.schemas import FAILED_SECONDS, JoinReply
from rankmesh_gateway.state import registry as registry_module
from rankmesh_gateway.state.epoch import JOIN_SILENCE_SECONDS
from rankmesh_gateway.state.registry import FORGET_SECONDS, JobNotFoundError, Registry
from rankmesh_gateway.state.validation import GatewayClosingError, GatewayFullError, InvalidRequestError


def form(registry, ask, size=2, **how) -> JoinReply:
    """Bring a world together; return its reply."""
    futures = [registry.join(ask.join(rank, size, **how)) for rank in range(size)]
    return futures[-1].result(timeout=0)


def states(registry) -> dict[tuple[int, int], str]:
    return {(info.epoch, info.member.rank): info.state for info in registry.ranks()}


class TestJoin:
    def test_the_last_rank_completes_all_with_one_reply(self, registry, ask):
        futures = [registry.join(ask.join(rank, 3)) for rank in (2, 0)]
        assert not any(future.done() for future in futures)
        futures.append(registry.join(ask.join(1, 3)))
        replies = [future.result(timeout=0) for future in futures]
        assert replies[0] == JoinReply(True, "job", 1, 3, [ask.member(rank) for rank in range(3)], [])
        assert replies[0] is replies[1] is replies[2]

    def test_a_world_of_one_is_complete_at_once(self, registry, ask):
        assert registry.join(ask.join(0, 1)).result(timeout=0).complete

    def test_pending_says_who_is_missing(self, registry, ask):
        registry.join(ask.join(1, 4))
        assert registry.join_status(ask.join(1, 4)) == JoinReply(False, "job", 1, 4, [ask.member(1)], [0, 2, 3])

    def test_pending_of_a_job_nobody_joined(self, registry, ask):
        assert registry.join_status(ask.join(0, 2)).missing == [0, 1]
        assert registry.counts() == (0, 0)

    def test_pending_after_completion_is_the_complete_reply(self, registry, ask):
        assert registry.join_status(ask.join(0)) == JoinReply(False, "job", 1, 2, [], [0, 1])
        assert form(registry, ask) == registry.join_status(ask.join(0))

    def test_repeating_a_join_changes_nothing(self, registry, ask):
        first = registry.join(ask.join(0))
        again = registry.join(ask.join(0))
        reply = registry.join(ask.join(1)).result(timeout=0)
        assert first.result(timeout=0) is again.result(timeout=0) is reply

    def test_repeating_a_join_after_completion_answers_at_once(self, registry, ask):
        reply = form(registry, ask)
        assert registry.join(ask.join(0)).result(timeout=0) == reply

    def test_threads_that_join_at_once(self, registry, ask):
        size, futures = 16, []
        start = threading.Barrier(size)

        def run(rank):
            start.wait()
            futures.append(registry.join(ask.join(rank, size)))

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wait(futures, timeout=5).not_done
        assert {future.result().epoch for future in futures} == {1}

    def test_jobs_do_not_touch_each_other(self, registry, ask):
        waiting = registry.join(ask.join(0, 2, job="a"))
        assert form(registry, ask, 3, job="b").job == "b"
        assert not waiting.done()
        assert registry.counts() == (2, 4)
        assert [info.job for info in registry.ranks("a")] == ["a"]


class TestRefusals:
    def test_a_rank_that_is_alive(self, registry, ask, clock):
        form(registry, ask)
        clock.advance(FAILED_SECONDS - 0.1)
        with pytest.raises(RankTakenError, match=r"rank 1 \(host1, pid 101\) at http://10.0.0.1:9001") as caught:
            registry.join(ask.join(1, life=2))
        assert caught.value.ranks == (1,)
        assert caught.value.address == "http://10.0.0.1:9001"

    def test_a_rank_whose_holder_is_joining(self, registry, ask, clock):
        registry.join(ask.join(1)).cancel()
        clock.advance(JOIN_SILENCE_SECONDS)
        with pytest.raises(RankTakenError, match="free after 30 s of silence"):
            registry.join(ask.join(1, life=2))

    def test_a_joiner_that_waits_is_not_silent(self, registry, ask, clock):
        waiting = registry.join(ask.join(1))
        clock.advance(10 * JOIN_SILENCE_SECONDS)
        with pytest.raises(RankTakenError):
            registry.join(ask.join(1, life=2))
        assert not waiting.done()

    def test_another_world_size(self, registry, ask):
        registry.join(ask.join(0, 2))
        with pytest.raises(WorldSizeMismatchError, match=r"rank 1 .* has 3 ranks, but rank 0 .* says 2") as caught:
            registry.join(ask.join(1, 3))
        assert caught.value.address == "http://10.0.0.1:9000"

    def test_a_refused_join_leaves_no_trace(self, registry, ask):
        first = registry.join(ask.join(0, 2))
        with pytest.raises(WorldSizeMismatchError):
            registry.join(ask.join(1, 3))
        assert len(registry.ranks()) == 1
        registry.join(ask.join(1, 2))
        assert first.result(timeout=0).complete

    def test_a_request_that_makes_no_sense(self, registry, ask):
        with pytest.raises(InvalidRequestError, match="rank 2 is not in a world of 2"):
            registry.join(ask.join(2, 2))
        assert registry.counts() == (0, 0)


class TestPlaces:
    def test_a_silent_joiner_is_replaced(self, registry, ask, clock):
        registry.join(ask.join(0)).cancel()
        clock.advance(JOIN_SILENCE_SECONDS + 0.1)
        registry.join(ask.join(0, life=2))
        reply = registry.join(ask.join(1)).result(timeout=0)
        assert [member.instance for member in reply.members] == ["r0-2", "r1-1"]

    def test_a_world_does_not_complete_with_a_silent_joiner(self, registry, ask, clock):
        registry.join(ask.join(0)).cancel()
        clock.advance(JOIN_SILENCE_SECONDS + 0.1)
        assert not registry.join(ask.join(1)).done()
        assert registry.join_status(ask.join(1)).missing == [0]

    def test_silent_joiners_do_not_hold_the_world_size(self, registry, ask, clock):
        registry.join(ask.join(0, 4)).cancel()
        clock.advance(JOIN_SILENCE_SECONDS + 0.1)
        assert form(registry, ask, 2, life=2).world_size == 2

    def test_asking_again_keeps_the_place(self, registry, ask, clock):
        for _ in range(5):
            registry.join(ask.join(0)).cancel()
            clock.advance(JOIN_SILENCE_SECONDS - 1)
        assert registry.join(ask.join(1)).done()

    def test_a_broken_connection_frees_the_place(self, registry, ask):
        registry.join(ask.join(0)).cancel()
        registry.withdraw_join(ask.join(0))
        assert registry.ranks() == []
        assert not registry.join(ask.join(1)).done()
        assert registry.join(ask.join(0, life=2)).done()

    def test_a_broken_connection_of_one_that_came_back_frees_nothing(self, registry, ask):
        old = registry.join(ask.join(0))
        registry.join(ask.join(0))
        old.cancel()
        registry.withdraw_join(ask.join(0))
        assert registry.join(ask.join(1)).done()

    def test_a_broken_connection_after_completion_frees_nothing(self, registry, ask):
        form(registry, ask)
        registry.withdraw_join(ask.join(0))
        registry.withdraw_join(ask.join(0, job="unheard of"))
        assert states(registry) == {(1, 0): "alive", (1, 1): "alive"}

    def test_a_joiner_that_leaves(self, registry, ask):
        waiting = registry.join(ask.join(0))
        registry.leave(ask.leave(0))
        with pytest.raises(CancelledError):
            waiting.result(timeout=0)
        assert registry.counts() == (0, 0)
        registry.join(ask.join(0, 3, life=2))

    def test_abandoned_futures_are_let_go(self, registry, ask):
        for _ in range(3):
            registry.join(ask.join(0)).cancel()
        (world,) = registry._jobs["job"]
        assert world.waiters == {}
        form(registry, ask)
        assert world.waiters == {}


class TestUnassigned:
    """Joiners that leave it to the gateway which rank they get."""

    @staticmethod
    def ranks(reply: JoinReply) -> dict[str, int]:
        return {member.instance: member.rank for member in reply.members}

    def test_they_get_ranks_in_the_order_they_came(self, registry, ask):
        futures = [registry.join(ask.join_unassigned(number, 3)) for number in (5, 9, 7)]
        reply = futures[0].result(timeout=0)
        assert self.ranks(reply) == {"r5-1": 0, "r9-1": 1, "r7-1": 2}
        assert [member.rank for member in reply.members] == [0, 1, 2]
        assert futures[1].result(timeout=0) is futures[2].result(timeout=0) is reply

    def test_they_fill_the_gaps_that_explicit_ranks_leave_even_late_ones(self, registry, ask):
        registry.join(ask.join_unassigned(8, 4))
        registry.join(ask.join(2, 4))
        registry.join(ask.join_unassigned(9, 4))
        reply = registry.join(ask.join(0, 4)).result(timeout=0)
        assert self.ranks(reply) == {"r0-1": 0, "r8-1": 1, "r2-1": 2, "r9-1": 3}

    def test_until_everyone_is_there_none_is_given_away(self, registry, ask):
        registry.join(ask.join_unassigned(8, 4))
        registry.join(ask.join(3, 4))
        reply = registry.join_status(ask.join_unassigned(8, 4))
        assert [(member.rank, member.instance) for member in reply.members] == [(3, "r3-1"), (-1, "r8-1")]
        assert reply.missing == [0, 1, 2]
        assert [info.state for info in registry.ranks()] == ["joining", "joining"]
        assert registry.counts().ranks == 2

    def test_repeating_the_join_keeps_the_place_in_the_order(self, registry, ask):
        registry.join(ask.join_unassigned(5, 3)).cancel()
        registry.join(ask.join_unassigned(6, 3))
        again = registry.join(ask.join_unassigned(5, 3))
        registry.join(ask.join_unassigned(7, 3))
        assert self.ranks(again.result(timeout=0)) == {"r5-1": 0, "r6-1": 1, "r7-1": 2}

    def test_repeating_the_join_after_completion_gives_the_same_rank(self, registry, ask):
        registry.join(ask.join_unassigned(5))
        reply = registry.join(ask.join_unassigned(6)).result(timeout=0)
        assert registry.join(ask.join_unassigned(6)).result(timeout=0) == reply
        assert registry.join_status(ask.join_unassigned(5)) == reply
        assert states(registry) == {(1, 0): "alive", (1, 1): "alive"}

    def test_one_that_gave_up_frees_its_place(self, registry, ask):
        waiting = registry.join(ask.join_unassigned(5))
        registry.leave(ask.leave_unassigned(5, reason="it gave up joining"))
        assert waiting.cancelled()
        assert registry.counts() == (0, 0)
        registry.join(ask.join_unassigned(5, life=2))
        reply = registry.join(ask.join_unassigned(6)).result(timeout=0)
        assert self.ranks(reply) == {"r5-2": 0, "r6-1": 1}

    def test_one_that_gave_up_just_when_the_world_was_complete_has_failed(self, registry, ask):
        registry.join(ask.join_unassigned(5))
        registry.join(ask.join_unassigned(6))
        registry.leave(ask.leave_unassigned(6, reason="it gave up joining"))
        assert states(registry) == {(1, 0): "alive", (1, 1): "failed"}

    def test_one_whose_connection_broke_or_that_went_silent_frees_its_place(self, registry, ask, clock):
        registry.join(ask.join_unassigned(5, 3)).cancel()
        registry.withdraw_join(ask.join_unassigned(5, 3))
        assert registry.ranks() == []
        registry.join(ask.join_unassigned(5, 3)).cancel()
        clock.advance(JOIN_SILENCE_SECONDS + 0.1)
        registry.join(ask.join_unassigned(6, 3))
        assert registry.counts().ranks == 1

    def test_one_more_than_there_are_ranks_is_refused(self, registry, ask):
        form(registry, ask)
        with pytest.raises(RankTakenError, match=r"all 2 ranks of job 'job' .* none left for process 108 on host8"):
            registry.join(ask.join_unassigned(8))
        registry.leave(ask.leave(1))
        assert not registry.join(ask.join_unassigned(8)).done(), "it may belong to the next world"

    def test_the_first_of_a_world_of_another_size_is_not_one_too_many(self, registry, ask):
        form(registry, ask)
        assert not registry.join(ask.join_unassigned(8, 3)).done()

    def test_another_world_size_names_who_came_first(self, registry, ask):
        registry.join(ask.join_unassigned(5, 2))
        with pytest.raises(WorldSizeMismatchError, match=r"a process without a rank yet \(host5, pid 105\)") as caught:
            registry.join(ask.join(1, 3))
        assert caught.value.ranks == ()


class TestClosing:
    def test_waits_end_and_nobody_is_taken_in_any_more(self, registry, ask):
        early = registry.join(ask.join(0))
        registry.close()
        assert early.cancelled()
        for call in (registry.join, registry.join_status):
            for rank in range(2):  # the second would complete the world, but the first has been sent away
                with pytest.raises(GatewayClosingError, match="about to end"):
                    call(ask.join(rank))
        with pytest.raises(GatewayClosingError):
            registry.heartbeat(ask.heartbeat(0))

    def test_who_did_not_hear_that_its_world_is_complete_still_can(self, registry, ask):
        reply = form(registry, ask)
        registry.close()
        assert registry.join(ask.join(0)).result(timeout=0) == registry.join_status(ask.join(0)) == reply
        with pytest.raises(GatewayClosingError):
            registry.join(ask.join(0, life=2))

    def test_reading_and_leaving_go_on(self, registry, ask):
        form(registry, ask)
        registry.close()
        registry.leave(ask.leave(0))
        assert states(registry) == {(1, 0): "left", (1, 1): "alive"}


class TestEpochs:
    def test_ranks_leave_and_come_back_at_different_times(self, registry, ask):
        form(registry, ask, 3)
        registry.leave(ask.leave(0))
        first = registry.join(ask.join(0, 3, life=2))
        registry.leave(ask.leave(2))
        registry.leave(ask.leave(1))
        registry.join(ask.join(1, 3, life=2))
        assert not first.done()
        reply = registry.join(ask.join(2, 3, life=2)).result(timeout=0)
        assert (reply.epoch, reply.complete) == (2, True)
        assert states(registry) == {(2, rank): "alive" for rank in range(3)}

    def test_the_new_world_may_have_another_size(self, registry, ask):
        form(registry, ask, 3)
        for rank in range(3):
            registry.leave(ask.leave(rank))
        assert form(registry, ask, 2, life=2).epoch == 2

    def test_a_failed_rank_does_not_hold_its_place(self, registry, ask, clock):
        form(registry, ask)
        clock.advance(FAILED_SECONDS)
        registry.heartbeat(ask.heartbeat(0))
        assert not registry.join(ask.join(1, life=2)).done()
        assert states(registry) == {(1, 0): "alive", (1, 1): "failed", (2, 1): "joining"}

    def test_an_old_world_is_shown_while_somebody_is_in_it(self, registry, ask):
        form(registry, ask, 3)
        registry.leave(ask.leave(0))
        registry.leave(ask.leave(1))
        form(registry, ask, 2, life=2)
        assert states(registry)[1, 2] == "alive"
        registry.leave(ask.leave(2))
        for rank in range(2):
            registry.leave(ask.leave(rank, life=2, epoch=2))
        form(registry, ask, 2, life=3)
        assert set(states(registry)) == {(3, 0), (3, 1)}

    def test_a_late_joiner_counts_from_completion(self, registry, ask, clock):
        registry.join(ask.join(0))
        clock.advance(60)
        registry.join(ask.join(1))
        assert states(registry)[1, 0] == "alive"


class TestForgetting:
    def test_a_job_that_is_long_over(self, registry, ask, clock):
        form(registry, ask)
        clock.advance(FORGET_SECONDS)
        registry.join(ask.join(0, job="other"))
        assert {info.job for info in registry.ranks()} == {"job", "other"}
        clock.advance(1)
        registry.join(ask.join(0, job="third"))
        assert {info.job for info in registry.ranks()} == {"other", "third"}

    def test_the_limit_pushes_out_the_job_that_is_over_longest(self, registry, ask, clock, monkeypatch):
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
    """The worlds as a whole."""

    @pytest.fixture
    def job(self, registry):
        def summary():
            (found,) = registry.jobs()
            return found.state, found.ranks

        return summary

    def test_a_life(self, registry, ask, job, clock):
        registry.join(ask.join(0, 2))
        assert job() == ("forming", {"joining": 1})
        registry.join(ask.join(1, 2))
        assert job() == ("running", {"alive": 2})
        registry.leave(ask.leave(0, reason="exit code 1"))
        assert job() == ("failing", {"failed": 1, "alive": 1})
        clock.advance(FAILED_SECONDS)
        assert job() == ("failed", {"failed": 2})

    def test_one_that_ends_in_order(self, registry, ask, job):
        form(registry, ask)
        for rank in range(2):
            registry.leave(ask.leave(rank))
        assert job() == ("ended", {"left": 2})

    def test_since_when(self, registry, ask, clock):
        registry.join(ask.join(0, 2))
        clock.advance(5)
        registry.join(ask.join(1, 2))
        clock.advance(3)
        assert registry.jobs()[0].since == pytest.approx(time.time() - 3, abs=1)

    def test_each_epoch_is_a_world(self, registry, ask):
        form(registry, ask)
        registry.leave(ask.leave(1))
        registry.join(ask.join(1, 2, life=2))
        assert [(found.epoch, found.state, found.world_size) for found in registry.jobs()] == [
            (1, "running", 2),
            (2, "forming", 2),
        ]

    def test_members_of_the_latest(self, registry, ask):
        with pytest.raises(JobNotFoundError, match="jobs here are: none"):
            registry.members("job")
        form(registry, ask)
        assert {rank: info.state for rank, info in registry.members("job").items()} == {0: "alive", 1: "alive"}
