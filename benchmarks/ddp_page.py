"""docs/benchmarks-ddp.md from the files of one or more runs: ``python -m benchmarks.ddp_page out/run1.json``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cases import Cell
from benchmarks.ddp import GLOO, OURS, PARTS, TRAININGS, case
from benchmarks.page import measured_on, ratio, table
from benchmarks.results import Results, Run
from benchmarks.workers import CHECKOUT

PAGE = CHECKOUT / "docs" / "benchmarks-ddp.md"
HEADINGS = [
    "a step of",
    "ranks",
    "busy",
    "over",
    "step, ms",
    "alone",
    "communication",
    "all_reduce",
    "items a second",
    "gloo / RankMesh: step",
    "communication",
]


def rows(results: Results) -> list[list[str]]:
    """Return two rows, RankMesh's and gloo's, of every training measured."""
    found = []
    for model, training in TRAININGS.items():
        for ranks in training.ranks:
            for busy in training.busy:
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
                    found.append([*head, *(f"{time:.1f}" for time in times), speed, *ratios])
    return found


def write(runs: Sequence[Run], path: Path = PAGE) -> None:
    """Write the page, a table a run; leave it as it is if no run measured training steps."""
    tables = [(run, rows(run.results)) for run in runs]
    parts = [f"{measured_on(run)}\n\n{table(HEADINGS, found, texts=1)}\n" for run, found in tables if found]
    if parts:
        path.write_text(f"# Benchmark of DistributedDataParallel\n\n{_METHOD}\n\n" + "\n".join(parts))


_METHOD = """\
Written by `make bench`; do not edit. A step is forward, backward with all gradients averaged, and SGD, of torch's
DistributedDataParallel over torch's backends `rankmesh` and `gloo`, in turns; each rank has one thread and data of its
own. *Busy* are processes that compute beside the ranks. *Alone* is the same step under `no_sync()`; *communication* is
the difference between the two: it includes torch's copies of the gradients into the buckets, and back unless the
gradients lie in the buckets (`gradient_as_bucket_view=True`). *All_reduce* is of the same buckets, begun together and
waited for, and nothing else. Before each turn the gradients are compared with the mean of
all ranks'. With as many ranks as cores, or more, communication takes its processor time from the backward passes, those
of the other ranks included."""


if __name__ == "__main__":
    write([Run.read(Path(path)) for path in sys.argv[1:]])
