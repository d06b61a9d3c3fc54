"""Training steps: what becomes of the ranks' figures, and their table."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import ddp, report
from benchmarks.__main__ import parse, part
from benchmarks.compact import compact
from benchmarks.plan import Cell
from benchmarks.results import Results, Run
from benchmarks.targets import TARGETS, judge


def turn(results: Results, peer: str, model: str, *by_rank: list[list[float]]) -> None:
    team: Any = SimpleNamespace(ranks=len(by_rank), peer=SimpleNamespace(name=peer), ask=lambda *order: by_rank)
    ddp._turn(team, model, 1, results)


@pytest.fixture
def results() -> Results:
    results = Results()
    turn(results, ddp.OURS, "mlp", [[0.12, 0.10, 0.01, 0.5]], [[0.11, 0.09, 0.02, 0.7]])
    turn(results, ddp.GLOO, "mlp", [[0.15, 0.10, 0.03, 0.1]], [[0.18, 0.08, 0.04, 0.1]])
    return results


def test_the_slowest_rank_counts(results: Results) -> None:
    medians = {part: results.summary(Cell(ddp.case("mlp", part, 2), ddp.OURS)).median for part in ddp.PARTS}
    wanted = {"step": 120_000, "alone": 100_000, "communication": 20_000, "all_reduce": 20_000, "overlap_percent": 60}
    assert medians == pytest.approx(wanted)


def test_communication_is_never_less_than_nothing() -> None:
    results = Results()
    turn(results, ddp.OURS, "net", [[0.10, 0.11, 0.01, 0.0]])
    assert results.turns[Cell(ddp.case("net", "communication", 1), ddp.OURS)] == [[1.0]]


def test_a_single_bucket_has_no_overlap() -> None:
    results = Results()
    turn(results, ddp.OURS, "net", *[[[0.12, 0.10, 0.01, 0.0]]] * 2)
    (row,) = report.training([Run(results, {}, datetime(2026, 1, 2, tzinfo=UTC))]).splitlines()[2:]
    assert row.split("|")[8].strip() == "-"
    assert "ddp_net_step" in compact(results)


def test_the_table_has_a_row_for_each_backend(results: Results) -> None:
    run = Run(results, {}, datetime(2026, 1, 2, tzinfo=UTC))
    lines = report.training([run]).splitlines()
    ours, gloo = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:])
    assert ours[:8] == [
        "MLP, 10 M parameters",
        "2",
        "RankMesh",
        "120.0 ±0%",
        "100.0 ±0%",
        "20.0 ±0%",
        "20.0 ±0%",
        "60 %",
    ]
    assert gloo[2:4] == ["gloo", "180.0 ±0%"]
    assert (ours[8:], gloo[8:]) == (["", ""], ["1.5x", "4.0x"])
    assert report.training([Run(Results(), {}, run.began)]) == ""


def test_targets_are_of_steps_and_of_communication(results: Results) -> None:
    verdicts = {one.row: judge(one, results).worst for one in TARGETS if one.row.startswith("DDP")}
    assert list(verdicts.values()) == ["1.5x", "4.0x"]


def test_a_part_of_it_is_measured() -> None:
    assert part(parse(["--only", "ddp", "--rounds", "3"])).ddp_rounds == {2: 3, 4: 3}
    assert part(parse(["--only", "ddp", "--ranks", "2"])).ddp_rounds == {2: 7}
    assert part(parse(["--only", "stores"])).ddp_rounds == {}
