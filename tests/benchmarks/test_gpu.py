"""GPUs: what is asked of them, over the double of CuPy; what becomes of the figures, which here are made up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from support.gpus import DOUBLE, TESTS

from benchmarks import gpu, gpu_report
from benchmarks.__main__ import parse, part
from benchmarks.plan import Case, Cell
from benchmarks.results import Results, Run
from benchmarks.team import ROOT

SMALL = """
import sys
from benchmarks import gpu
from benchmarks.__main__ import main
gpu.CHECKED_CALLS, gpu.CHECKED_BYTES = 6, 4096
sys.exit(main(sys.argv[1:]))
"""
WRONG = """
import rankmesh as dist
from benchmarks import gpu_rank
dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
print(gpu_rank.check("nccl", 4096, 6, 1))
right = dist.all_reduce
dist.all_reduce = lambda array, **how: array.fill(0) if array.size == 1024 else right(array, **how)
try:
    gpu_rank.check("nccl", 4096, 6, 1)
except ArithmeticError as error:
    print(error)
dist.destroy_process_group()
"""


def on_the_double(program: str, gpus: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(DOUBLE), str(ROOT), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {"PYTHONPATH": path, "CUDA_DOUBLE_GPUS": gpus, "CUDA_DOUBLE_DELAY": "0"}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def test_without_a_gpu_it_says_why_in_one_line() -> None:
    done = on_the_double(SMALL, "", "--only", "gpu")
    assert (done.returncode, done.stdout) == (0, "")
    (line,) = done.stderr.splitlines()
    assert "There is nothing to measure on GPUs: CUDA finds no GPU" in line


@pytest.mark.processes
def test_the_section_is_printed_and_kept(tmp_path: Path) -> None:
    sizes = f"4096,{1 << 40}"
    kept = tmp_path / "run.json"
    done = on_the_double(
        SMALL, "gpu-0", "--only", "gpu", "--ranks", "2", "--sizes", sizes, "--rounds", "1", "--json", str(kept)
    )
    assert done.returncode == 0, done.stderr
    assert "is left out" not in done.stderr.replace("1024 GiB with 2 ranks is left out", "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("## Measured on 1 x a double of a GPU, ")
    assert [line for line in lines if line.startswith("###")] == [
        "### NCCL, one rank a GPU", "### Ranks that share a GPU", "### Results and memory",
    ]  # fmt: skip
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in lines if line.startswith("| ")]
    for ranks in ("1", "2"):
        assert [row for row in rows if row[0] == ranks] == [[ranks, "4 KiB"]]
    assert "1024 GiB with 2 ranks is left out: no room." in lines
    assert sum("6 calls of 4 KiB, all results right; CuPy's pool grew by 0 B" in line for line in lines) == 3
    again = gpu_report.section(Run.from_json(json.loads(kept.read_text()))).splitlines()
    assert [line for line in again if line[:1] != "|"] == [line for line in lines if line[:1] != "|"]


def test_a_wrong_result_is_an_error() -> None:
    done = on_the_double(WRONG, "gpu-0")
    right, wrong = done.stdout.splitlines()
    assert right == "[[0.0, 0.0]]", done.stderr
    assert wrong.startswith("rank 0 of 1: ")
    assert wrong.endswith(" elements of 6 all_reduces are wrong")


def test_what_came_instead_of_ipc_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Staged:
        version = "cpu:mesh,cuda:mesh; CUDA IPC is not allowed"

        def __init__(self, *args: object) -> None: ...
        def __enter__(self) -> Staged:
            return self

        def __exit__(self, *args: object) -> None: ...

    monkeypatch.setattr(gpu, "Team", Staged)
    (line,) = gpu._on_one_gpu(gpu.Plan(1), 2, [4], Results(), lambda line: None)
    assert line.endswith(f"2 ranks, is left out: what came instead is {Staged.version}.")


@pytest.fixture
def results() -> Results:
    results = Results()
    for ranks, microseconds in {2: (1000, 10_000, 300), 4: (1000, 9_990, 149)}.items():
        case = Case(gpu.ALL_REDUCE, ranks, gpu_report.JUDGED)
        for peer, one in zip((gpu.IPC, gpu.STAGED, gpu.COPY), microseconds, strict=True):
            results.add(Cell(case, peer.name), [one])
    return results


def test_targets_are_met_or_missed(results: Results) -> None:
    verdicts = [line.partition(", wanted ")[::2] for line in gpu_report.verdicts(results).splitlines()]
    assert verdicts == [
        ("* 2 ranks, 256 MiB", "≥ 60 % of the bound: 60, met"),
        ("* 2 ranks, 256 MiB", "≥ 10 times as fast as through host memory: 10, met"),
        ("* 4 ranks, 256 MiB", "≥ 60 % of the bound: 59.6, MISSED"),
        ("* 4 ranks, 256 MiB", "≥ 10 times as fast as through host memory: 9.99, MISSED"),
    ]


def test_speeds_are_of_the_bytes_moved(results: Results) -> None:
    two, _ = gpu_report.on_one_gpu(results).splitlines()[2:]
    cells = [cell.strip() for cell in two.split("|")[1:-1]]
    assert cells == ["2", "256 MiB", "1 000 ±0%", "10 000 ±0%", "10x", "1073.74", "1789.57", "60.0"]


def test_the_slowest_rank_counts_over_nccl() -> None:
    results, by_rank = Results(), [[[3e-6, 20e-6, 2e-6, 16e-6]], [[4e-6, 18e-6, 1e-6, 16e-6]]]
    team: Any = type("Made", (), {"ranks": 2, "ask": lambda self, *order: by_rank})()
    gpu._turn(team, 4, 100, results)
    (row,) = gpu_report.over_nccl(results).splitlines()[2:]
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells == ["2", "4 B", "2.0 ±0%", "4.0 ±0%", "2.0", "100.0", "16 ±0%", "20 ±0%", "4.0", "25.0"]


@pytest.mark.parametrize(("pool", "free", "verdict"), [(0, 0, "met"), (512, 0, "MISSED"), (0, 512, "MISSED")])
def test_memory_that_grows_is_a_miss(pool: int, free: int, verdict: str) -> None:
    results = Results()
    for part_, grew in zip(gpu.GREW, (pool, free), strict=True):
        results.add(Cell(Case(part_, 2, 4), gpu.IPC.name), [grew], 1000)
    assert gpu_report.checks(results).endswith(verdict)


def test_without_figures_there_is_no_section() -> None:
    assert gpu_report.section(Run(Results(), {}, datetime(2026, 1, 2, tzinfo=UTC))) == ""


def test_a_part_of_it_is_measured() -> None:
    assert part(parse(["--only", "gpu"])).gpus == gpu.Plan(7, [2, 4], gpu.SIZES)
    assert part(parse(["--only", "gpu", "--ranks", "4", "--sizes", "4"])).gpus == gpu.Plan(7, [4], [4])
    assert part(parse(["--only", "stores"])).gpus is None
