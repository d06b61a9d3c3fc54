"""Starts and footprints in a few numbers; the processes themselves are measured, not tested."""

from __future__ import annotations

import os

from benchmarks import footprint, join


def test_starts_in_tables() -> None:
    steps = dict.fromkeys(join.STEPS, 0.01)
    starts = {("by hand", 4): [join.Start(seconds, steps, 2.0) for seconds in (0.5, 0.7, 0.6)]}
    whole, _, broken_down = join.report(starts).partition("\n\n")
    assert [cell.strip() for cell in whole.splitlines()[2].split("|")[1:-1]] == [
        "by hand", "4", "0.60", "0.50 - 0.70", "2.00", "0.500",
    ]  # fmt: skip
    assert broken_down.splitlines()[2].count(" 10 ") == len(join.STEPS)


def test_threads_have_no_steps() -> None:
    report = join.report({("threads", 2): [join.Start(0.5, {}, 1.0)]})
    assert "interpreter" not in report


def test_ranks_are_not_sent_elsewhere(monkeypatch) -> None:
    monkeypatch.setenv("RANKMESH_TOKEN", "a")
    monkeypatch.setenv("MASTER_ADDR", "b")
    monkeypatch.setenv("KEPT", "c")
    assert join.clean_environment()["KEPT"] == "c"
    assert not {"RANKMESH_TOKEN", "MASTER_ADDR"} & set(join.clean_environment())


def test_a_process_is_seen_from_outside() -> None:
    memory = footprint._memory(os.getpid())
    assert memory.resident >= memory.proportional >= memory.own > 1 << 20
    assert footprint._busy_seconds(os.getpid()) > 0
    threads, descriptors = footprint._counts(os.getpid())
    assert threads >= 1
    assert descriptors >= 3


def test_what_a_rank_takes_beyond_numpy() -> None:
    bare = footprint.Footprint(footprint.Memory(30, 20, 10), 0.0, 1, 3)
    rank = footprint.Footprint(footprint.Memory(50_000_030, 40_000_020, 30_000_010), 0.005, 3, 14)
    world = footprint.World([rank], bare)
    assert world.beyond(0) == (50_000_000, 40_000_000, 30_000_000)
    assert "50.0 |" in footprint.report([(1, False, world)])
    assert "0.50 |" in footprint.report([(1, False, world)])
