"""README.md: short, its figures are those of the measurements, and its commands exist."""

from __future__ import annotations

import math
import re
from pathlib import Path

from support.consoles import below

from benchmarks.cases import Case, Cell
from benchmarks.page import summary
from benchmarks.results import Run

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RESULTS = Run.read(DOCS / "performance" / "run.json").results
TEXT = " ".join((ROOT / "README.md").read_text().split())


def test_it_is_read_in_five_minutes() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


def test_the_speed_is_that_of_the_run() -> None:
    assert summary(RESULTS) in (ROOT / "README.md").read_text()


def test_the_speed_of_inference_is_that_of_the_table() -> None:
    page = below((DOCS / "torch.md").read_text(), "Inference, split over ranks")
    speeds = dict(re.findall(r"^\| ([^|]+?) +\| +2 \| +([\d.]+) \|", page, re.MULTILINE))
    ours, gloo, mpi = (f"{float(speeds[title]):.0f}" for title in ("RankMesh shm", "gloo", "Open MPI"))
    assert f"two ranks generates {ours} tokens/s, with gloo {gloo} and Open MPI {mpi}" in TEXT


def test_the_cost_of_an_idle_rank_is_that_of_the_run() -> None:
    percent, megabytes = (RESULTS.median(Cell(Case(name, 4), "rankmesh")) for name in ("idle_percent", "rss_mb"))
    assert f"takes {percent:.2g} % of a processor and {math.ceil(megabytes)} MB" in TEXT


def test_the_faults_are_those_of_the_table() -> None:
    (row,) = re.findall(r"^\| all \|(.*)\|$", (DOCS / "failure-model.md").read_text(), re.MULTILINE)
    runs, hangs, wrong, named = [cell.strip() for cell in row.split("|")][:4]
    assert (hangs, wrong) == ("0", "0")
    assert f"In {runs} runs with seeded faults {named} errors did, and none hung" in TEXT


def test_torchs_own_tests_are_those_of_the_table() -> None:
    page = (DOCS / "torch-suite.md").read_text()
    newest = re.findall(r"^\| ([\d.]+) \| as for gloo \|", page, re.MULTILINE)[-1]
    row = rf"^\| {re.escape(newest)} \| {{}} \| (\d) \| (\d+) \| \d+ \| (\d+) \| (\d+) \|"
    rows = re.findall(row.format("as for gloo"), page, re.MULTILINE)
    assert [ranks for ranks, *_ in rows] == ["2", "3", "8"]
    assert all(gloo == ours and failed == "0" for _, gloo, ours, failed in rows)
    assert (
        f"it passes all {sum(int(row[1]) for row in rows)} of PyTorch's own distributed tests that gloo passes" in TEXT
    )
    ((_, gloo, ours, _),) = re.findall(row.format("with GPUs in host memory"), page, re.MULTILINE)
    assert f"and {ours} of {gloo} with host memory in place of GPUs" in TEXT


def test_every_target_that_pages_name_is_in_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")]
    named = {
        (page.name, name) for page in pages for name in re.findall(r"(?:`|\$ )make ([a-z][\w-]*)", page.read_text())
    }
    assert {"demo", "test", "wheel"} <= targets
    assert [each for each in sorted(named) if each[1] not in targets] == []
