"""Scores of the ranks, from the heartbeats of made jobs."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import pytest

from rankmesh_agent.wire.schemas import ResourceUsage
from rankmesh_gateway.stragglers.scores import WINDOW_SECONDS, HeartbeatSample, RankScores

RANKS = 4
SEEDS = 100
Groups = dict[str, tuple[int, ...]]
WORLD: Groups = {"world": tuple(range(RANKS))}
MESH: Groups = {"rows 0": (0, 1), "rows 1": (2, 3), "columns 0": (0, 2), "columns 1": (1, 3)}
"""Two by two ranks: each is in a group of either kind."""


class Job:
    """A job whose ranks compute and make a call in each group, in turn; they send heartbeats of some moment a second.

    Args:
        seed: of the random numbers.
        slow: returns by which factor rank 2 computes longer in the step that begins at a time.
        step: seconds of a step.
        in_call: seconds of a call in which nobody waits.
    """

    def __init__(
        self,
        seed: int,
        slow: Callable[[float], float] = lambda at: 1.0,
        *,
        groups: Groups = WORLD,
        step: float = 0.1,
        in_call: float = 0.005,
        seconds: float = 60.0,
    ) -> None:
        draw = random.Random(seed)
        self.phases = [draw.random() for _ in range(RANKS)]
        self.begins: dict[tuple[int, str], list[float]] = {}
        self.spent: dict[tuple[int, str], list[float]] = {}
        free = [0.0] * RANKS
        while min(free) < seconds:
            free = [at + draw.gauss(step, step / 50) * (slow(at) if rank == 2 else 1) for rank, at in enumerate(free)]
            for group, ranks in groups.items():
                end = max(free[rank] for rank in ranks) + in_call
                for rank in ranks:
                    spent = self.spent.setdefault((rank, group), [])
                    self.begins.setdefault((rank, group), []).append(free[rank])
                    spent.append((spent[-1] if spent else 0.0) + end - free[rank])
                    free[rank] = end

    def report(self, rank: int, now: float) -> HeartbeatSample:
        at = int(now - self.phases[rank]) + self.phases[rank]
        groups = {}
        for (of_rank, group), begins in self.begins.items():
            if of_rank == rank:
                calls = bisect_right(begins, at)
                spent = self.spent[rank, group]
                before = spent[calls - 2] if calls > 1 else 0.0
                groups[group] = calls, before + min(spent[calls - 1] - before, at - begins[calls - 1]) if calls else 0.0
        return HeartbeatSample(at, ResourceUsage(0.9 * at, 0.0, 10 * at, 7, "R"), groups)

    def run(self, seconds: float = 60.0) -> tuple[RankScores, dict[int, float], set[int]]:
        """Return the scores at the end, when each rank came to be slow, and the ranks that ever were."""
        scores, since, ever = RankScores(), dict[int, float](), set[int]()
        for tick in range(1, int(seconds / 2)):
            scores.observe({rank: self.report(rank, 2.0 * tick) for rank in range(RANKS)}, 2.0 * tick)
            since = {rank: since.get(rank, 2.0 * tick) for rank in scores.slow}
            ever |= since.keys()
        return scores, since, ever


@pytest.mark.parametrize("groups", [WORLD, MESH], ids=["world", "mesh"])
@pytest.mark.parametrize("step", [0.05, 0.5])
def test_the_slow_rank_alone_is_named_in_99_of_100_jobs(groups: Any, step: float):
    found = [Job(seed, lambda at: 1.3, groups=groups, step=step).run() for seed in range(SEEDS)]
    assert sum(ever == {2} for _, _, ever in found) >= 0.99 * SEEDS
    assert max(since[2] for _, since, _ in found if 2 in since) <= WINDOW_SECONDS + 10.0
    scores = [each.values[2] for each, _, _ in found]
    assert sorted(scores)[SEEDS // 2] == pytest.approx(0.3 / 1.3 * step / (step + 0.005), rel=0.25)


@pytest.mark.parametrize("groups", [WORLD, MESH], ids=["world", "mesh"])
@pytest.mark.parametrize(("step", "in_call"), [(0.05, 0.025), (0.5, 0.5)])
def test_no_rank_of_a_healthy_job_is_slow(groups: Any, step: float, in_call: float):
    assert not any(Job(seed, groups=groups, step=step, in_call=in_call).run()[2] for seed in range(SEEDS))


def test_a_rank_that_is_slow_in_one_of_20_steps():
    jobs = [Job(seed, lambda at: 3.0 if int(at / 0.11) % 20 == 7 else 1.0) for seed in range(SEEDS)]
    assert sum(job.run()[2] == {2} for job in jobs) >= 0.99 * SEEDS


def test_one_long_wait_makes_no_rank_slow():
    job = Job(1, lambda at: 30.0 if 20.0 <= at < 20.2 else 1.0)
    assert not job.run()[2]
    assert Job(1, lambda at: 30.0 if 20.0 <= at < 20.2 else 1.0).run(26.0)[0].values[2] > 0.2


def test_a_rank_that_recovers():
    scores, since, ever = Job(1, lambda at: 1.3 if at < 30.0 else 1.0).run()
    assert (since, ever) == ({}, {2})
    assert scores.values[2] < 0.02


def test_a_group_that_was_made_meanwhile_counts_soon():
    scores, job = RankScores(), Job(1, lambda at: 1.3)
    for at in range(2, 8, 2):
        reports = {rank: job.report(rank, at) for rank in range(RANKS)}
        if at == 2:
            reports = {rank: HeartbeatSample(each.at, None, {}) for rank, each in reports.items()}
        scores.observe(reports, at)
    assert scores.values[2] > 0.15
    assert scores.usage().keys() == {0, 1, 2, 3}


def test_the_use_of_resources_in_a_second():
    scores, _, _ = Job(1).run()
    assert scores.usage()[2] == ResourceUsage(pytest.approx(0.9), 0.0, pytest.approx(10.0), 7, "R")


def test_a_rank_that_has_gone():
    scores = RankScores()
    job = Job(1, lambda at: 1.3)
    for at in range(2, 60, 2):
        scores.observe({rank: job.report(rank, at) for rank in range(RANKS)}, at)
    assert [*scores.slow] == [2]
    scores.observe({rank: job.report(rank, 60) for rank in (0, 1, 3)}, 60)
    assert not scores.slow
    assert scores.values.keys() == {0, 1, 3}
