"""docs/performance.md and docs/benchmarks.md from the file of a run: ``python -m benchmarks.page out/run.json``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks import data_page
from benchmarks.cases import COLLECTIVES, KIB, MIB, SIZES, Case, Cell
from benchmarks.figures import measured_on, ratio, table
from benchmarks.implementations import IMPLEMENTATIONS
from benchmarks.results import Results, Run
from benchmarks.workers import CHECKOUT

PAGE = CHECKOUT / "docs" / "performance.md"
RANGES: dict[str, Callable[[int], bool]] = {
    "up to 4 KiB": lambda nbytes: nbytes <= 4 * KIB,
    "64 KiB and 1 MiB": lambda nbytes: 4 * KIB < nbytes < 16 * MIB,
    "16 MiB and more": lambda nbytes: nbytes >= 16 * MIB,
}


def ratios(results: Results, ours: str, theirs: str) -> dict[Case, float]:
    """Return the ratio of each case of the collectives and send_recv, on ranks that are alone on the machine."""
    operations = ("all_reduce", *COLLECTIVES)
    chosen = [
        case for case in results.cases() if case.operation in operations and case.nbytes in SIZES and not case.busy
    ]
    pairs = {case: results.ratio(Cell(case, theirs), Cell(case, ours)) for case in chosen}
    return {case: value for case, value in pairs.items() if value is not None}


def summary(results: Results) -> str:
    """Return the table of RankMesh's speed over that of another library: median and worst, by range of sizes."""
    rows = []
    for ours, theirs in data_page.PAIRS:
        found = ratios(results, ours, theirs)
        row = ["shared memory" if ours.endswith("shm") else "TCP", IMPLEMENTATIONS[theirs].title]
        for wanted in RANGES.values():
            values = [value for case, value in found.items() if wanted(case.nbytes)]
            slower = sum(value < 1 for value in values)
            middle, worst = (ratio(figure(values)) if values else "" for figure in (median, min))
            row.append(f"{middle} ({worst}; {slower} of {len(values)})")
        rows.append(row)
    return table(["transport", "speed over", *RANGES], rows, texts=2)


def chart(results: Results, path: Path) -> None:
    """Draw the ratios over the size of the array, a panel for each other library, as SVG: median, worst to best."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "rankmesh"  # the same figures give the same file
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for ours, theirs in data_page.PAIRS:
        panel = panels[int(theirs == "mpi")]
        found = ratios(results, ours, theirs)
        sizes = sorted({case.nbytes for case in found})
        values = [[value for case, value in found.items() if case.nbytes == nbytes] for nbytes in sizes]
        if sizes:
            (line,) = panel.loglog(sizes, list(map(median, values)), marker=".", label=IMPLEMENTATIONS[ours].title)
            panel.fill_between(sizes, list(map(min, values)), list(map(max, values)), color=line.get_color(), alpha=0.2)
        panel.set(title=f"speed over {IMPLEMENTATIONS[theirs].title}", xlabel="bytes of the array")
    for panel in panels:
        panel.axhline(1, color="gray", linewidth=1)
        panel.grid(alpha=0.3)
        panel.legend()
    panels[0].set_ylabel("times as fast: median, worst to best")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def write(run: Run, path: Path = PAGE) -> None:
    """Write the page and the data page, with the chart and the run's timings in a folder of the page's name."""
    folder = path.with_suffix("")
    folder.mkdir(exist_ok=True)
    chart(run.results, folder / "ratios.svg")
    timings = folder / "run.json"
    timings.write_text(json.dumps(run.as_json(), separators=(",", ":")) + "\n")
    data_page.write(run, timings, path.with_name(data_page.PAGE.name))
    text = _PAGE.format(summary=summary(run.results), folder=folder.name, machine=measured_on(run))
    path.write_text(text)


_PAGE = """\
# Performance

This page tells how fast RankMesh is beside gloo and Open MPI on one machine, and where it is slower.
`make bench` measures and writes it.

{summary}

A cell is the median over all cases in that range of sizes; in brackets the worst case, and how many cases are slower.
2x means that RankMesh takes half the time. A case is a collective (all_reduce, broadcast, all_gather, reduce_scatter,
all_to_all, reduce, gather, scatter) or a message there and back, of 2, 4 or 8 ranks, on an array of 4 B to 256 MiB.

![Ratios over the size of the array]({folder}/ratios.svg)

## When another library is faster

* **Open MPI, rooted calls on short arrays.** In a broadcast, scatter, gather or reduce of Open MPI, a rank that only
  sends goes on before the others have come. In RankMesh each rank waits for all, so that every rank raises a failure
  or a mismatch in the same call. Many short rooted calls in a row take several times as long.
* **gloo over TCP, long arrays.** Broadcast and all_to_all of many MiB between 4 or 8 ranks on few cores are about as
  fast as gloo's; some cases are slower.
* **GPUs.** Nothing of RankMesh has been measured on one ([GPUs](gpu.md)).

[Benchmark data](benchmarks.md) lists each slower case, the training steps of DistributedDataParallel, the store, and
the targets. A [language model split over two ranks](torch.md#inference-split-over-ranks) has its tokens a second.

## How it was measured

1. Timed are the calls of a user's program in Python: RankMesh on NumPy arrays, gloo through torch.distributed on CPU
   tensors, Open MPI through mpi4py's buffer calls.
2. All ranks run on one machine. The ranks of all libraries are started once, and take turns, round by round.
3. Arrays are float32; a size is that of the larger array of a call.
4. Every result is checked before and after it is timed.
5. The time of a call is that of its slowest rank.
6. A ratio is the other library's time divided by RankMesh's in the same round; a case has the median of its rounds.
7. Machines differ, and with more ranks than cores they differ much: measure yours with `make bench` (25 minutes), or
   `rankmesh bench` in a job.

{machine}
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description="Write the pages of a run.")
    parser.add_argument("file", type=Path, metavar="FILE", help="a run, from python -m benchmarks --json FILE")
    write(Run.read(parser.parse_args().file))
