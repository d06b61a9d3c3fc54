"""The fault suite finds what it looks for: faults of RankMesh's that are planted, one of each sort."""

from __future__ import annotations

import pytest

from tools.faults import page
from tools.faults.__main__ import table
from tools.faults.kinds import KINDS, specify
from tools.faults.run import Outcome, Run

pytestmark = pytest.mark.processes

SEED = 4
SHORT = 6.0


def run(kind: str, what: str = "") -> tuple[Outcome, int]:
    """Run with something planted at a rank that is not the victim."""
    spec = specify(SEED, kind)
    victim = spec["faults"][0]["rank"]
    planted = next(rank for rank in range(spec["size"]) if rank != victim)
    if what:
        spec["plant"] = {"what": what, "rank": planted}
    if what == "hang":
        spec["timeout"] = SHORT
    return Run(spec, margin=SHORT).run(), planted


def test_a_wrong_result_is_found() -> None:
    outcome, planted = run("stop and go on", "wrong")
    assert outcome.wrong
    assert all(text.startswith(f"rank {planted}: step") for text in outcome.wrong)
    assert "NumPy has" in outcome.wrong[0]


def test_a_wait_without_end_is_found_with_its_stack() -> None:
    outcome, planted = run("kill", "hang")
    assert [text.split(":")[0] for text in outcome.hangs] == [f"rank {planted}"], outcome.log
    assert "in _plant" in outcome.log, "the stack of the rank that hangs"


def test_a_rank_that_is_blamed_wrongly_is_found() -> None:
    outcome, planted = run("kill", "blame")
    assert any(text.startswith(f"rank {planted} after") for text in outcome.unnamed), outcome.log


@pytest.mark.parametrize(
    ("what", "found"),
    [("leak", "-planted"), ("descriptor", "descriptor /dev/null"), ("process", "sleep 60")],
)
def test_what_is_left_behind_is_found(what: str, found: str) -> None:
    outcome, _ = run("stop and go on", what)
    assert any(found in text for text in outcome.leaks), outcome.log


def test_a_run_without_its_fault_is_found() -> None:
    spec = specify(SEED, "stop and go on")
    spec["at"] = [spec["rounds"], 0]
    assert Run(spec).run().wrong == ["no fault has come about: nothing is judged"]


def test_the_table_counts_what_is_found() -> None:
    good, bad = Outcome(1, "kill", recoveries=2), Outcome(2, "kill", recoveries=2)
    good.errors = [{"seconds": 0.1}, {"seconds": 0.3}]
    bad.errors = [{"seconds": 0.2}]
    bad.missing, bad.hangs, bad.wrong, bad.leaks = 1, ["a"], ["b", "c"], ["d"]
    bad.unnamed, bad.unrecovered = ["e"], ["f"]
    assert table([good, bad], ["kill"])[2] == "| kill | 2 | 1 | 1 | 75 | 0.20 | 0.30 | 1 | 75 |"
    assert page._row("kill", [good, bad], []) == "| kill | 2 | 1 | 1 | 3 of 4 | 0.20 / 0.30 | 1 | 3 of 4 |  |  |  |"
    assert len(bad.findings) == 6
    assert not good.findings


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_run_follows_from_its_seed_and_its_kind(kind: str) -> None:
    assert specify(17, kind) == specify(17, kind)
    assert specify(17, kind) != specify(18, kind)
