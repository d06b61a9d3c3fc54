"""The other parts: joins and idle ranks, GPUs over the double of CuPy, training steps, thresholds of algorithms."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.gpus import DOUBLE, TESTS

from benchmarks import ddp, inference, join, tune
from benchmarks.__main__ import main
from benchmarks.cases import Cell
from benchmarks.results import Results
from benchmarks.tune import Row, Sample, rows, switching
from benchmarks.workers import CHECKOUT, MeasurementError, WorkerGroup
from rankmesh_agent.collectives.select import TABLE
from rankmesh_agent.wire.ops import OpType

THREE = [(100, "small"), (1000, "middle"), (math.inf, "large")]


def samples(*seconds: tuple[float, ...]) -> list[Sample]:
    return [Sample(10**power, each) for power, each in enumerate(seconds)]


@pytest.mark.processes
def test_a_join_and_an_idle_world_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKMESH_GATEWAY", "http://127.0.0.1:1")  # is not what the ranks go by
    monkeypatch.setattr(join, "RANKS", (1, 2))
    monkeypatch.setattr(join, "IDLE_RANKS", 2)
    monkeypatch.setattr(join, "SETTLE_SECONDS", 0.1)
    monkeypatch.setattr(join, "IDLE_SECONDS", 0.2)
    results = Results()
    join.measure(1, results)
    found = {(cell.case.operation, cell.case.ranks): results.median(cell) for cell in results.turns}
    assert set(found) == {("join", 1), ("join", 2), ("rss_mb", 2), ("idle_percent", 2)}
    assert 1e4 < found["join", 2] < 60e6
    assert 1 < found["rss_mb", 2] < 200


@pytest.mark.processes
def test_a_failed_join_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "_RANK", "raise SystemExit('no licence')")
    with pytest.raises(MeasurementError, match="0 of 2 ranks became ready"):
        join.join(2)


def on_the_double(gpus: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(DOUBLE), str(CHECKOUT), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {"PYTHONPATH": path, "CUDA_DOUBLE_GPUS": gpus, "CUDA_DOUBLE_DELAY": "0"}
    command = [sys.executable, "-m", "benchmarks", "--only", "gpu", *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(
        command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_without_a_gpu_the_reason_is_stated() -> None:
    done = on_the_double("")
    assert done.returncode == 0
    assert "GPUs are left out: CUDA finds no GPU" in done.stderr


@pytest.mark.processes
def test_arrays_on_gpus_are_measured_and_checked(tmp_path: Path) -> None:
    kept = tmp_path / "run.json"
    done = on_the_double("gpu-0", "--ranks", "2", "--sizes", "4096", str(1 << 50), "--rounds", "1", "--json", str(kept))
    assert done.returncode == 0, done.stderr
    cells = json.loads(kept.read_text())["cells"]
    assert {(cell["peer"], cell["ranks"], cell["nbytes"]) for cell in cells} == {
        ("rankmesh-nccl", 1, 4096),
        ("nccl", 1, 4096),
        *((name, 2, 4096) for name in ("rankmesh-staged", "gpu-copy")),
    }


def test_a_training_step_counts_for_the_slowest_rank() -> None:
    class Two(WorkerGroup):
        def ask(self, *order: object) -> list[list[list[float]]]:
            return [[[3.0, 1.0, 0.5], [3.0, 2.0, 0.5]], [[2.0, 1.5, 0.25], [4.0, 1.0, 0.75]]]

    results, group = Results(), Two(ddp.IMPLEMENTATIONS[0], 2)
    ddp._turn(group, "mlp", 0, results)
    medians = {part: results.median(Cell(ddp.case("mlp", part, 2), ddp.OURS)) / 1e6 for part in ddp.PARTS}
    assert medians == {"step": 3.5, "alone": 1.75, "communication": 1.75, "all_reduce": 0.625}


def test_a_sum_of_inference_is_that_of_the_rank_that_comes_last() -> None:
    text = [[7, 2.5], [8, 2.0]]

    class Two(WorkerGroup):
        def ask(self, *order: object) -> list[list[object]]:
            return [[2.0, [0.1, 0.3, 0.9, 0.1, 0.5, 0.1], text], [1.0, [0.4, 0.2, 0.1, 0.6, 0.1, 0.6], text]]

    results = Results()
    assert inference.turn(Two(inference.MEASURED[2][0], 2), 2, results).tolist() == text
    medians = [results.median(cell) / 1e6 for cell in inference.cells("rankmesh-shm", 2)]
    assert medians == pytest.approx([1.0, 1.0, 0.1])
    assert inference.rows(results) == [["RankMesh shm", "2", "1.0", "1000.00", "1000.00 ms", "100.0%", "100000.0"]]


@pytest.mark.processes
def test_a_small_model_is_measured_and_written_into_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "MEASURED", inference.MEASURED[:3])
    run = inference.measure((2, 3, 101), tokens=3, rounds=2)
    head, tail = f"# Inference\n\n{inference.BEGIN}\n", f"\n{inference.END}\n\nMore.\n"
    page = inference.page(f"{head}of yesterday{tail}", run)
    assert page.startswith(f"{head}Measured on ")
    assert page.endswith(tail)
    titles = [
        line.strip("| ").split(" |")[0].rstrip() for line in page.splitlines() if re.search(r"\|  +[12] \|", line)
    ]
    assert titles == ["one rank", "one rank, two threads", "RankMesh shm"]


def test_an_algorithm_is_taken_where_it_is_fastest() -> None:
    found = switching(THREE, samples((1, 2, 3), (1, 2, 3), (3, 2, 3), (math.inf, 2, 3), (math.inf, math.inf, 9)))
    assert found == {"small": 10, "middle": 1000}
    assert switching(THREE, samples((1, 2, 3), (1, 2, 3), (4, 3, 2))) == {"small": 10, "middle": -1}
    assert switching(THREE[1:], samples((1, 2), (1, 2))) == {"middle": 10}
    disturbed = samples((1, 1.9), (500, 2), (1, 1.9), (1, 1.9), (3, 2))
    assert switching(THREE[1:], disturbed) == {"middle": 1000}


def test_rows_are_those_with_a_choice() -> None:
    keys = {row.key for row in rows()}
    assert {("ALL_REDUCE", "segment"), ("ALL_REDUCE", "link")} <= keys
    assert ("ALL_TO_ALL", "link") not in keys


@pytest.mark.processes
def test_every_algorithm_of_a_row_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "EFFORT", tune.Effort(rounds=1, least=1, repetitions=1, seconds=0.0005))
    seen: list[Sample] = []
    monkeypatch.setattr(tune, "switching", lambda algorithms, found: seen.extend(found) or {algorithms[0][1]: 17})
    row = Row(OpType.ALL_REDUCE, "segment")
    found = tune.tune([row], [2], [4096, 2 << 20])
    assert found[row.key][row.algorithms[0][1]] == {**TABLE[row][0].limits, 2: 17}
    small, large = seen
    assert not any(map(math.isinf, small.seconds))
    assert any(map(math.isinf, large.seconds)), "more than a slot"


def test_the_command_line_refuses_unknown_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "nothing"])
    assert "invalid choice: 'nothing'" in capsys.readouterr().err


@pytest.mark.processes
def test_the_host_time_of_calls_on_gpus_is_measured_without_any() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_host", "--calls", "20", "--rounds", "2"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=120, check=True)
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[2:]]
    calls = ["all_reduce", "all_reduce(async_op=True), wait()", "all_reduce, NumPy"]
    assert [row[:3] for row in rows] == [[ranks, "cpu:mesh,cuda:nccl", call] for ranks in ("1", "2") for call in calls]
    assert all(float(row[3]) >= float(row[4]) > 0 for row in rows)
