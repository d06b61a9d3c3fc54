"""Whether targets are met."""

from __future__ import annotations

import pytest
from support.made_up_run import run

from benchmarks.plan import MIB, Case, Cell
from benchmarks.targets import LIMITS, TARGETS, Limit, Target, judge

SMALL, LARGE = "shared memory, 2 ranks, all_reduce to 4 KiB", "shared memory, 2 ranks, all_reduce 16, 64 MiB"


def target(row: str, against: str) -> Target:
    return next(one for one in TARGETS if (one.row, one.against) == (row, against))


@pytest.mark.parametrize(
    ("row", "against", "factor", "met", "worst"),
    [
        (SMALL, "gloo", 1, True, "60x"),
        (SMALL, "gloo", 2, False, "30x"),
        (SMALL, "Open MPI", 0.5, True, "0.40x"),
        (SMALL, "Open MPI", 1, False, "0.20x"),
        (LARGE, "Open MPI", 1, True, "2.0x"),
        ("shared memory, 2 ranks, all_reduce 64 KiB, 1 MiB", "Open MPI", 1, True, "1.0x"),
        ("store: acknowledged set", "torch's add", 2, True, "1.0x"),
        ("store: add", "torch's add", 1, False, "0.67x"),
    ],
)
def test_ratios_are_judged(row: str, against: str, factor: float, met: bool, worst: str) -> None:
    verdict = judge(target(row, against), run(factor).results)
    assert (verdict.met, verdict.worst) == (met, worst)


def test_the_worst_ratio_decides() -> None:
    made = run()
    made.results.add(Cell(Case("all_reduce", 2, 64 * MIB), "gloo"), [60_000])
    made.results.add(Cell(Case("all_reduce", 2, 64 * MIB), "rankmesh-shm"), [30_000])
    verdict = judge(target(LARGE, "gloo"), made.results)
    assert (verdict.met, verdict.value) == (False, 2)
    assert verdict.where == Cell(Case("all_reduce", 2, 64 * MIB), "rankmesh-shm")


def test_limits_are_judged() -> None:
    _, join, idle, memory = LIMITS
    assert [judge(limit, run().results).met for limit in (join, idle, memory)] == [True, None, True]
    assert judge(join, run(2).results).worst == "2.40 s"
    assert judge(join, run(2).results).met is False


def test_a_limit_may_be_of_a_difference() -> None:
    limit, made = LIMITS[0], run()
    assert judge(limit, made.results).met is None  # embedded was measured, attached was not
    made.results.add(limit.cell, [100.0])
    made.results.turns[limit.beyond] = [[30.0]]
    verdict = judge(limit, made.results)
    assert (verdict.met, verdict.worst, verdict.value) == (False, "70.00 µs", 70.0)
    made.results.turns[limit.beyond] = [[50.0]]
    assert judge(limit, made.results).met is True


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    assert judge(target("barrier, 2 and 4 ranks", "gloo"), run().results).met is True
    assert judge(target("store: multi_get of 100 keys", "torch's multi_get"), run().results).met is None


def test_every_target_is_of_cases_that_a_full_run_measures() -> None:
    from benchmarks.plan import full

    measured = {*full()}
    for one in TARGETS:
        if not one.row.startswith(("store", "join", "DDP")):
            assert {cell.case for pair in one.comparisons for cell in pair} <= measured
    assert len({(one.row, getattr(one, "against", "")) for one in (*TARGETS, *LIMITS)}) == len(TARGETS) + len(LIMITS)
    assert all(isinstance(one, Limit) for one in LIMITS)
