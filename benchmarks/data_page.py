"""docs/benchmarks.md, the data page: targets, training steps, and each cell in which RankMesh is slower."""

from __future__ import annotations

from pathlib import Path

from benchmarks.cases import Cell
from benchmarks.ddp import GLOO, OURS, PARTS, TRAININGS, case
from benchmarks.figures import case_name, measured_on, ratio, table
from benchmarks.implementations import IMPLEMENTATIONS
from benchmarks.results import Results, Run
from benchmarks.targets import TARGETS, Limit, judge
from benchmarks.workers import CHECKOUT

PAGE = CHECKOUT / "docs" / "benchmarks.md"
PAIRS = (("rankmesh-shm", "gloo"), ("rankmesh-shm", "mpi"), ("rankmesh-tcp", "gloo"))
"""The implementations that are compared: RankMesh's, the other."""


def targets(results: Results) -> str:
    """Return the table of targets: the worst figure and its cell, and whether it meets the target."""
    rows = []
    for target in TARGETS:
        met, worst, cell = judge(target, results)
        if worst is not None:
            figure = f"{worst:.2f} {target.unit}" if isinstance(target, Limit) else ratio(worst, target.least)
            where = case_name(cell.case) if cell else ""
            rows.append(["met" if met else "missed", target.row, target.against, target.wanted, where, figure])
    return table(["", "case", "against", "wanted", "worst at", "figure"], rows, texts=5)


def slower(results: Results) -> str:
    """Return the table of cells in which RankMesh took longer than another library."""
    rows = []
    for ours, theirs in PAIRS:
        for each in results.cases():
            value = results.ratio(Cell(each, theirs), Cell(each, ours))
            if value is not None and value < 1:
                rows.append([IMPLEMENTATIONS[ours].title, case_name(each), IMPLEMENTATIONS[theirs].title, ratio(value)])
    return table(["", "case", "against", "figure"], rows, texts=3)


def training_steps(results: Results) -> str:
    """Return a table with two rows, RankMesh's and gloo's, of every training measured."""
    rows = []
    for model, training in TRAININGS.items():
        for ranks, busy in [(ranks, busy) for ranks in training.ranks for busy in training.busy]:
            cases = {part: case(model, part, ranks, busy) for part in PARTS}
            if any(Cell(one, name) not in results.turns for one in cases.values() for name in (OURS, GLOO)):
                continue
            for name, title in ((OURS, "RankMesh"), (GLOO, "gloo")):
                times = [results.median(Cell(one, name)) / 1000 for one in cases.values()]
                count, unit = training.items.split()
                speed = f"{int(count) * ranks * 1000 / times[0]:.0f} {unit}"
                ratios = ["", ""]
                if name == GLOO:
                    pairs = [(Cell(cases[part], GLOO), Cell(cases[part], OURS)) for part in PARTS[:3:2]]
                    ratios = [ratio(value) for pair in pairs if (value := results.ratio(*pair)) is not None]
                head = [training.title, str(ranks), str(busy), title]
                rows.append([*head, *(f"{time:.1f}" for time in times), speed, *ratios])
    return table(_STEP, rows, texts=1) if rows else ""


def write(run: Run, data: Path, path: Path = PAGE) -> None:
    """Write the page of a run, whose timings are in the file ``data``."""
    steps = training_steps(run.results)
    notes = "".join(f"{line}\n\n" for line in dict.fromkeys(run.left_out))
    introduction = _INTRODUCTION.format(data=data.relative_to(path.parent))
    path.write_text(
        f"# Benchmark data\n\n{introduction}\n\n{measured_on(run)}\n\n{notes}"
        f"## Targets\n\nEach row shows its worst case.\n\n{targets(run.results)}\n\n"
        + (f"## Training steps\n\n{_STEPS}\n\n{steps}\n\n" if steps else "")
        + f"## Slower than others\n\nAll cases in which RankMesh is slower.\n\n{slower(run.results)}\n"
    )


_INTRODUCTION = """\
This page has the targets of `make bench`, which writes it, and every case in which RankMesh is slower.
[Performance](performance.md) has the summary and the method; [{data}]({data}) has each timing."""
_STEP = (
    *("a step of", "ranks", "busy", "over", "step ms", "alone", "communication", "all_reduce", "items a second"),
    *("gloo / RankMesh: step", "communication"),
)
_STEPS = """\
A step is forward, backward with all gradients averaged, and SGD, of torch's DistributedDataParallel over torch's
backends `rankmesh` and `gloo`, in turns; each rank has one thread and data of its own. *Busy* are processes that
compute beside the ranks. *Alone* is the same step under `no_sync()`; *communication* is the difference between the two,
with torch's copies of the gradients into the buckets, and back unless the gradients lie in the buckets
(`gradient_as_bucket_view=True`). *All_reduce* is of the same buckets, begun together and waited for. With as many ranks
as cores, or more, communication takes its processor time from the backward passes of all ranks."""
