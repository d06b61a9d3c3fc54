"""Figures: ratios, targets, JSON, and the page."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from benchmarks import ddp, quick
from benchmarks.cases import KIB, MIB, Case, Cell, full
from benchmarks.data_page import training_steps
from benchmarks.figures import ratio
from benchmarks.page import write
from benchmarks.results import Results, Run
from benchmarks.targets import TARGETS, Limit, Target, judge

TIMES = {
    ("all_reduce", 4): {"rankmesh-shm": 5, "rankmesh-tcp": 50, "gloo": 300, "mpi": 1},
    ("all_reduce", 64 * KIB): {"rankmesh-shm": 20, "rankmesh-tcp": 80, "gloo": 1200, "mpi": 20},
    ("all_reduce", 16 * MIB): {"rankmesh-shm": 2000, "rankmesh-tcp": 8000, "gloo": 14000, "mpi": 4000},
    ("store_get", 0): {"rankmesh-shm": 30, "gloo": 40},
}


def run(factor: float = 1.0) -> Run:
    """Return a run of two ranks in which RankMesh takes a factor longer."""
    results = Results(versions={"rankmesh-shm": "RankMesh 9", "gloo": "gloo 9"})
    for (operation, nbytes), times in TIMES.items():
        for name, time in times.items():
            value = time * factor if name.startswith("rankmesh") else float(time)
            for drift in (1.0, 3.0, 2.0):  # the machine's, the same for all
                results.add(Cell(Case(operation, 2, nbytes), name), [drift * value, drift * value * 1.1], calls=9)
    results.add(Cell(Case("join", 4), "rankmesh"), [1_200_000.0 * factor])
    return Run(results, {"processor": "Some CPU"}, datetime(2026, 1, 2, tzinfo=UTC), 24.6, ["Absent is left out."])


def cells(row: str) -> list[str]:
    """Return the cells of a row of a Markdown table."""
    return [cell.strip() for cell in row.strip("|").split("|")]


def target(row: str, against: str = "") -> Target | Limit:
    (found,) = [one for one in TARGETS if (one.row, one.against) == (row, against)]
    return found


def test_a_ratio_is_the_median_of_rounds() -> None:
    results = Results()
    theirs, ours = Cell(Case("x", 2), "a"), Cell(Case("x", 2), "b")
    for slower, faster in ((10, 5), (100, 10), (30, 10)):
        results.add(theirs, [slower])
        results.add(ours, [faster])
    assert results.ratio(theirs, ours) == 3
    assert results.ratio(theirs, Cell(Case("x", 2), "c")) is None
    assert results.median(theirs) == 30


@pytest.mark.parametrize(
    ("row", "against", "factor", "met", "worst"),
    [
        ("shm, all collectives to 4 KiB", "gloo", 1, True, 60),
        ("shm, all collectives to 4 KiB", "gloo", 20, False, 3),
        ("shm, all_reduce from 64 KiB", "Open MPI", 1, False, 1),
        ("shm, all collectives from 64 KiB", "gloo", 1, True, 7),
        ("TCP, all collectives to 4 KiB", "gloo", 1, True, 6),
        ("store: get", "torch's get", 1, True, 40 / 30),
        ("store: get", "torch's get", 2, False, 20 / 30),
        ("join of 4 ranks, process start to ready", "", 1, True, 1.2),
        ("join of 4 ranks, process start to ready", "", 2, False, 2.4),
        ("barrier, 2 and 4 ranks", "gloo", 1, None, None),
    ],
)
def test_the_worst_cell_decides(row: str, against: str, factor: float, met: bool | None, worst: float | None) -> None:
    verdict = judge(target(row, against), run(factor).results)
    assert verdict.met is met
    assert verdict.worst == (None if worst is None else pytest.approx(worst))


def test_every_target_is_of_cases_that_a_full_run_measures() -> None:
    measured, others = set(full()), ("ddp_", "join", "idle_percent", "rss_mb")
    for one in TARGETS:
        cells = [cell for pair in one.comparisons for cell in pair] if isinstance(one, Target) else [one.cell]
        assert cells, one
        for cell in cells:
            assert cell.case in measured or cell.case.operation.startswith(others), (one.row, cell)


def test_a_run_comes_back_from_its_json() -> None:
    kept = run()
    back = Run.from_json(json.loads(json.dumps(kept.as_json())))
    assert (back.results.calls, back.machine, back.began) == (kept.results.calls, kept.machine, kept.began)
    for cell in kept.results.turns:
        assert back.results.median(cell) == pytest.approx(kept.results.median(cell), abs=1e-3)


def test_the_quick_run_states_its_targets() -> None:
    found = {(one["row"], one["against"]): one for one in quick.as_json(run())["targets"]}
    one = found["shm, all collectives to 4 KiB", "gloo"]
    assert (one["wanted"], one["worst"], one["met"]) == ("≥ 4x", 60.0, True)


@pytest.mark.parametrize(
    ("value", "wanted", "text"),
    [
        (0.0112, 1, "0.011x"),
        (0.52, 1, "0.52x"),
        (3.12, 1, "3.1x"),
        (120.4, 1, "120x"),
        (3.97, 4, "3.97x"),
        (0.998, 1, "0.998x"),
    ],
)
def test_a_ratio_is_never_rounded_up_to_what_is_wanted(value: float, wanted: float, text: str) -> None:
    assert ratio(value, wanted) == text


def test_the_pages_have_medians_targets_a_chart_and_all_figures(tmp_path: Path) -> None:
    write(run(20.0), tmp_path / "performance.md")
    (row,) = [line for line in (tmp_path / "performance.md").read_text().splitlines() if "| Open MPI" in line]
    assert cells(row) == [
        "shared memory",
        "Open MPI",
        "0.010x (0.010x; 1 of 1)",
        "0.050x (0.050x; 1 of 1)",
        "0.10x (0.10x; 1 of 1)",
    ]
    assert (tmp_path / "performance" / "ratios.svg").read_text().startswith("<?xml")
    kept = Run.from_json(json.loads((tmp_path / "performance" / "run.json").read_text())).results
    assert kept.ratio(Cell(Case("all_reduce", 2, 4), "gloo"), Cell(Case("all_reduce", 2, 4), "rankmesh-shm")) == 3

    data = (tmp_path / "benchmarks.md").read_text()
    (row,) = [line for line in data.splitlines() if "shm, all collectives to 4 KiB" in line]
    assert cells(row) == ["missed", "shm, all collectives to 4 KiB", "gloo", "≥ 4x", "all_reduce, 2 ranks, 4 B", "3.0x"]
    slower = [cells(line) for line in data[data.index("## Slower") :].splitlines() if line.startswith("| RankMesh")]
    assert ["RankMesh shm", "all_reduce, 2 ranks, 64 KiB", "Open MPI", "0.050x"] in slower
    assert not [row for row in slower if row[0] == "RankMesh shm" and row[1:3] == ["all_reduce, 2 ranks, 4 B", "gloo"]]
    assert "Absent is left out." in data
    assert "## Training steps" not in data


def test_the_table_of_training_steps_has_both_libraries_and_their_ratio() -> None:
    results = Results()
    for name, time in ((ddp.OURS, 10_000.0), (ddp.GLOO, 20_000.0)):
        for part in ddp.PARTS:
            results.add(Cell(ddp.case("net", part, 2, busy=4), name), [time])
    ours, theirs = [cells(line) for line in training_steps(results).splitlines() if "22 k" in line]
    assert ours[1:] == ["2", "4", "RankMesh", "10.0", "10.0", "10.0", "10.0", "12800 images", "", ""]
    assert theirs[3:] == ["gloo", "20.0", "20.0", "20.0", "20.0", "6400 images", "2.0x", "2.0x"]
