"""Starts and footprints, small."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks import footprint, join
from benchmarks.team import PeerFailedError


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


@pytest.mark.processes
@pytest.mark.parametrize("way", join.WAYS)
def test_a_start_is_measured(way: str) -> None:
    start = join.WAYS[way](2)
    assert 0 < start.seconds < join.DEADLINE
    assert start.processor > 0
    if way != "threads":
        assert set(start.steps) == set(join.STEPS)
        assert sum(start.steps.values()) <= start.seconds


@pytest.mark.processes
def test_a_failed_start_is_told_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "RANK", "no_such_rank.py")
    with pytest.raises(PeerFailedError, match=r"(?s)0 of 2 ranks became ready; exit codes \[2.*no_such_rank\.py"):
        join.by_hand(2)


@pytest.mark.processes
def test_what_does_not_heed_a_signal_is_killed() -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        join.end([process], seconds=0.1)
        assert process.returncode == -9


@pytest.mark.processes
def test_idle_ranks_are_measured() -> None:
    world = footprint.measure(2, seconds=0.2, asked=True)
    assert len(world.ranks) == 2
    assert all(rank.memory.resident > world.bare.memory.resident for rank in world.ranks)
    assert all(rank.threads > 1 for rank in world.ranks)


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
