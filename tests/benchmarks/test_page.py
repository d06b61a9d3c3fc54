"""The page, from made-up runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.made_up_run import run

from benchmarks import reasons, report
from benchmarks.charts import bus_bandwidth, drawn
from benchmarks.page import main
from benchmarks.plan import MIB, Case, Cell

SMALL = "shared memory, 2 ranks, all_reduce to 4 KiB"


def cells(text: str) -> list[list[str]]:
    """Return the cells of a Markdown table, without the line under its headings."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [rows[0], *rows[2:]]


def test_targets_show_every_runs_worst_ratio() -> None:
    table = cells(report.targets([run(), run(2)]))
    assert table[0] == ["", "case", "against", "wanted", "worst at", "run 1", "run 2"]
    rows = {tuple(row[1:3]): row for row in table[1:]}
    assert rows[SMALL, "gloo"] == [
        *("missed (1 of 2 not in all runs)", SMALL, "gloo", "≥ 40x", "all_reduce, 2 ranks, 4 B", "60x", "30x")
    ]
    assert rows["store: acknowledged set", "torch's add"][0] == "met"
    assert rows["join of 4 ranks, process start to ready", ""][-2:] == ["1.20 s", "2.40 s"]
    assert rows["idle rank, processor", ""][0] == "not measured"


def test_a_missed_target_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(reasons.REASONS, "store: add", "it is Python")
    text = report.targets([run()])
    rows = {tuple(row[1:3]): row for row in cells(text)}
    assert rows["store: add", "torch's add"][0] == "missed"
    assert "* **store: add**: missed, because it is Python" in text.splitlines()
    assert "store: get**" not in text, "what is met needs no reason"


def test_times_have_their_spread_and_ratios_of_both_runs() -> None:
    table = cells(report.latencies([run(), run(2)], "all_reduce"))
    assert table[0][2:6] == ["RankMesh shm", "RankMesh TCP", "gloo", "Open MPI"]
    assert table[0][6:] == ["gloo / shm", "Open MPI / shm", "gloo / TCP", "rounds"]
    first = table[1]
    assert first[:2] == ["2", "4 B"]
    assert first[6:] == ["60x / 30x", "0.20x / 0.10x", "6.0x / 3.0x", "3"]
    assert first[3].endswith("%")
    assert report.latencies([run()], "broadcast") == ""


def test_a_run_without_a_cell_has_a_dash() -> None:
    old = run()
    for cell in [cell for cell in old.results.turns if cell.case == Case("all_reduce", 2, 4)]:
        del old.results.turns[cell]
    del old.results.turns[Cell(Case("rss_mb", 4, 0), "rankmesh")]
    assert cells(report.latencies([old, run()], "all_reduce"))[1][6:9] == ["- / 60x", "- / 0.20x", "- / 6.0x"]
    assert cells(report.idle([old, run()]))[1][-1] == "- / 40.00"
    first = cells(report.every_ratio([old, run()]))[1]
    assert first == ["all_reduce, 2 ranks, 4 B", "gloo", "≥ 40x", "- / 60x", "met"]


def test_each_run_says_where_it_was_worst() -> None:
    other = run()
    for cell, turns in other.results.turns.items():
        if cell == Cell(Case("all_reduce", 2, 16 * MIB), "gloo"):
            other.results.turns[Cell(Case("all_reduce", 2, 64 * MIB), "gloo")] = turns
            ours = other.results.turns[cell._replace(peer="rankmesh-shm")]
            other.results.turns[Cell(Case("all_reduce", 2, 64 * MIB), "rankmesh-shm")] = [
                [2 * one for one in turn] for turn in ours
            ]
            break
    rows = {tuple(row[1:3]): row for row in cells(report.targets([run(), other]))[1:]}
    row = rows["shared memory, 2 ranks, all_reduce 16, 64 MiB", "gloo"]
    assert row[4:] == ["all_reduce, 2 ranks, 16 MiB / all_reduce, 2 ranks, 64 MiB", "7.0x", "3.5x"]


def test_joins_show_the_extremes_of_all_runs() -> None:
    assert cells(report.joins([run(2), run()]))[1] == ["launcher", "4", "2.40 / 1.20", "1.20", "2.40"]


def test_hidden_is_the_part_of_the_shorter() -> None:
    (row,) = cells(report.overlaps(run().results))[1:]
    assert row[-2:] == ["50 %", "100 %"]  # 10 ms beside 20 ms of computing took 25 ms, beside sleeping 20 ms


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    results = run().results
    cell = Cell(Case("all_reduce", 2, 16 * MIB), "rankmesh-shm")
    assert bus_bandwidth(results, cell) == pytest.approx(16 * MIB / results.summary(cell).median / 1e3)
    assert bus_bandwidth(results, Cell(Case("barrier", 2, 0), "rankmesh-shm")) is None


def test_the_page_and_its_charts_are_written(tmp_path: Path) -> None:
    files = [tmp_path / "run1.json", tmp_path / "run2.json"]
    for file, hour in zip(files, (5, 3), strict=True):
        made = run()
        made.began = made.began.replace(hour=hour)
        file.write_text(json.dumps(made.as_json()))
    page = tmp_path / "made.md"
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "old.svg").write_text("of a run long ago")
    assert main([*map(str, files), "--out", str(page)]) == 0
    text = page.read_text()
    for words in (
        "| began     | 2026-01-02 03:04 UTC",  # the earlier run comes first
        "Some CPU, 2 cores",
        "A peer is left out",
        "## Targets",
        "### barrier",
        "## Join",
    ):
        assert words in text
    charts = {path.name for path in (tmp_path / "made").iterdir()}
    assert (
        charts == set(drawn(run().results)) == {"all_reduce_shm_2.svg", "all_reduce_tcp_2.svg", "bus_bandwidth_2.svg"}
    )
    assert all(f"](made/{name})" in text for name in charts)
