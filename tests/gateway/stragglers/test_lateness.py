"""The ranks that make the others wait, in made spans with seeded slowdowns."""

from __future__ import annotations

import random
from typing import Any

import pytest

from rankmesh_agent.wire.schemas import ResourceUsage
from rankmesh_agent.wire.snapshot import RankWaits, SnapshotCall
from rankmesh_gateway.schemas import Straggler
from rankmesh_gateway.stragglers.lateness import late_ranks, slow_links
from rankmesh_gateway.stragglers.spans import Span

RANKS = 4
STEPS = 60
SEEDS = 200


def made(
    seed: int,
    slow: Any = lambda step: 1.0,
    *,
    in_call: float = 0.0,
    slow_ranks: tuple[int, ...] = (2,),
    stalls: float = 0.0,
    steps: int = STEPS,
) -> list[Span]:
    """Return the spans of ranks whose steps take 100 ms, by two hundredths; those of some ranks are slower.

    Args:
        seed: of the random numbers.
        slow: returns the factor for a step.
        in_call: seconds that they are longer in each call than the others.
        slow_ranks: which they are.
        stalls: probability that a rank, whichever it is, stalls in a step, by 80 ms on average.
        steps: number of steps.
    """
    draw, found, free = random.Random(seed), [], [0.0] * RANKS
    for step in range(steps):
        begins = [
            free[rank] + draw.gauss(0.1, 0.002) * (slow(step) if rank in slow_ranks else 1) for rank in range(RANKS)
        ]
        begins = [each + draw.expovariate(12.5) * (draw.random() < stalls) for each in begins]
        for rank, begin in enumerate(begins):
            free[rank] = max(begins) + 0.001 + in_call * (rank in slow_ranks)
            call = SnapshotCall("w", step + 1, "all_reduce", "", 0.0)
            found.append(Span(rank, begin, free[rank], "world", call, True))
    return sorted(found, key=lambda span: span.begin)


BUSY = {rank: ResourceUsage(0.98, 0.0, 0.0) for rank in range(RANKS)}


def find(
    spans: list[Span], usage: dict[int, ResourceUsage] = BUSY, hosts: str = "aaaa", uncertainty: float = 0.0
) -> list[Straggler]:
    return late_ranks(spans, usage, dict(enumerate(hosts)), uncertainty)


@pytest.mark.parametrize(
    "slow",
    [lambda step: 1.3, lambda step: 3.0 if step % 20 == 7 else 1.0, lambda step: 1.3 if step >= STEPS - 20 else 1.0],
    ids=["in all steps", "in one of 20 steps", "for 20 steps"],
)
def test_the_rank_that_is_slow_is_named_in_99_of_100_jobs(slow: Any):
    named = sum([each.ranks for each in find(made(seed, slow))] == [[2]] for seed in range(SEEDS))
    assert named >= 0.99 * SEEDS


def test_no_rank_of_a_healthy_job_is_named():
    assert not any(find(made(seed)) for seed in range(SEEDS))


@pytest.mark.parametrize("stalls", [0.01, 0.1])
def test_on_a_busy_host_where_all_ranks_stall_now_and_then(stalls: float):
    few = SEEDS // 4
    named = sum(bool(find(made(seed, stalls=stalls, steps=10 * STEPS))) for seed in range(few))
    assert named == 0
    slow = [find(made(seed, lambda step: 1.3, stalls=stalls, steps=10 * STEPS)) for seed in range(few)]
    assert [[each.ranks for each in found] for found in slow] == [[[2]]] * few


def test_the_host_that_is_slow_is_named_in_99_of_100_jobs():
    slow = [find(made(seed, lambda step: 1.3, slow_ranks=(2, 3)), hosts="aabb") for seed in range(SEEDS)]
    assert sum([each.ranks for each in found] == [[2, 3]] for found in slow) >= 0.99 * SEEDS
    assert not any(find(made(seed), hosts="aabb") for seed in range(SEEDS))


def test_clocks_that_may_be_wrong_name_no_rank():
    assert find(made(1, lambda step: 1.3), uncertainty=0.05) == []


def test_the_time_since_when():
    (found,) = find(made(1, lambda step: 1.3 if step >= STEPS - 20 else 1.0))
    assert found.since == pytest.approx(20 * 0.131, rel=0.1)
    assert found.late == pytest.approx(0.03, rel=0.2)


@pytest.mark.parametrize(
    ("usage", "spans", "why"),
    [
        (
            ResourceUsage(0.98, 0.0, 0.0),
            made(1, lambda step: 1.3),
            "computes (98% of a core): 130 ms between two calls",
        ),
        (
            ResourceUsage(0.1, 0.0, 0.0),
            made(1, lambda step: 1.3),
            "waits, for data perhaps, and does not compute (10% of",
        ),
        (ResourceUsage(0.6, 0.4, 0.0), made(1, lambda step: 1.3), "waits for a core 40% of the time"),
        (
            ResourceUsage(0.2, 0.0, 900.0),
            made(1, lambda step: 1.3),
            "has memory on the disk, and reads 900 pages a second",
        ),
        (ResourceUsage(0.9, 0.0, 0.0), made(1, in_call=0.03), "ends its calls later than the others: its network"),
    ],
)
def test_the_reason(usage: ResourceUsage, spans: list[Span], why: str):
    (found,) = find(spans, BUSY | {2: usage})
    assert found.ranks == [2]
    assert found.why.startswith(why)


def test_a_rank_computes_that_uses_more_of_a_core_than_the_others():
    others = {rank: ResourceUsage(0.3, 0.0, 0.0) for rank in range(RANKS)}
    (found,) = find(made(1, lambda step: 1.3), others | {2: ResourceUsage(0.55, 0.0, 0.0)})
    assert found.why.startswith("computes (55% of a core): 130 ms between two calls")


def test_a_rank_that_has_made_one_call():
    once = Span(3, 0.0, 0.1, "pair", SnapshotCall("p", 1, "barrier", "", 0.0), True)
    spans = [once, *(span for span in made(1, lambda step: 1.3) if span.rank != 3)]
    assert [each.ranks for each in find(spans)] == [[2]]


def test_a_rank_whose_use_of_resources_is_not_known():
    (found,) = find(made(1, lambda step: 1.3), {})
    assert found.why.startswith("130 ms between two calls")


@pytest.mark.parametrize(
    ("waits", "named"),
    [
        ({0: {1: 0.4, 2: 0.4}, 1: {0: 0.4}, 2: {0: 0.38}}, [0]),
        ({0: {1: 0.3, 2: 0.3}, 1: {2: 0.4}, 2: {1: 0.4}}, [1, 2]),
        ({0: {1: 0.3, 2: 0.3}, 1: {0: 0.4, 2: 0.3}, 2: {0: 0.3, 1: 0.4}}, []),
        ({0: {1: 0.09}, 1: {0: 0.09}, 2: {}}, []),
        ({0: {1: 0.9}, 1: {0: 0.9}}, []),
        ({0: {1: 0.3, 2: 0.3, 3: 0.3}, 1: {0: 0.4}, 2: {0: 0.4}, 3: {0: 0.4}}, []),
        ({0: {2: 0.5}, 1: {0: 0.5}, 2: {0: 0.5}, 3: {0: 0.5}}, [0, 2]),
        ({0: {1: 0.5}, 1: {2: 0.5}, 2: {3: 0.5}, 3: {0: 0.5}}, []),
    ],
    ids=["a rank", "a link", "all links alike", "little", "two ranks", "a star", "a link of a star", "a ring"],
)
def test_slow_links(waits: dict[int, dict[int, float]], named: list[int]):
    found = slow_links("job", waits_of(waits), {})
    assert [each.ranks for each in found] == ([named] if named else [])
    assert slow_links("job", waits_of(waits), {0: ResourceUsage(0.5, 0.9, 0.0)}) == [], "of a rank without a core"


def waits_of(shares: dict[int, dict[int, float]]) -> dict[int, RankWaits]:
    return {
        rank: RankWaits({str(other): {"w 1": share / 2, "w 2": share / 2} for other, share in each.items()})
        for rank, each in shares.items()
    }


def test_ranks_that_wait_for_each_other_in_turn_have_no_slow_link():
    turns = {rank: RankWaits({str(1 - rank): {f"w {call}": 0.02 for call in range(rank, 40, 2)}}) for rank in range(2)}
    assert slow_links("job", turns | {2: RankWaits({})}, {}) == []
