"""docs/benchmarks.md from the files of one or more runs: ``python -m benchmarks.page out/run1.json out/run2.json``.

One chart and one table; every figure is in a JSON file beside the page. ``--page docs/benchmarks-on-NAME.md`` writes
that of another processor, to which the page links.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.cases import Case, Cell
from benchmarks.implementations import COMPARED, IMPLEMENTATIONS
from benchmarks.results import Results, Run
from benchmarks.targets import TARGETS, Limit, Target, judge
from benchmarks.workers import CHECKOUT

PAGE = CHECKOUT / "docs" / "benchmarks.md"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, texts: int = 0) -> str:
    """Return a Markdown table with aligned columns, of which the first ``texts`` are text and the others figures."""
    widths = [max(3, *(len(row[column]) for row in [headings, *rows])) for column in range(len(headings))]
    rule = ["-" * width if column < texts else "-" * (width - 1) + ":" for column, width in enumerate(widths)]

    def line(cells: Sequence[str]) -> str:
        pairs = enumerate(zip(cells, widths, strict=True))
        return f"| {' | '.join(c.ljust(width) if n < texts else c.rjust(width) for n, (c, width) in pairs)} |"

    return "\n".join(line(cells) for cells in [headings, rule, *rows])


def size(nbytes: float) -> str:
    """Return a number of bytes in the largest unit of which it is a whole number."""
    for unit in ("B", "KiB", "MiB"):
        if not nbytes or nbytes % 1024:
            return f"{nbytes:.0f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.0f} GiB"


def ratio(value: float, wanted: float = 1.0) -> str:
    """Return a ratio with two digits or more, never rounded up to what is wanted: 0.011x, 0.52x, 3.97x, 120x."""
    digits = 3 if value < 0.1 else 2 if value < 1 else 1 if value < 10 else 0
    while digits < 6 and value < wanted <= round(value, digits):
        digits += 1
    return f"{value:.{digits}f}x"


def case_name(case: Case) -> str:
    """Return a case as text."""
    busy = f" beside {case.busy} busy processes" if case.busy else ""
    return f"{case.operation}, {case.ranks} ranks{f', {size(case.nbytes)}' if case.nbytes else ''}{busy}"


def timings(results: Results, title: str = "median µs") -> str:
    """Return the table of median microseconds for the terminal, with ratios to the first implementation."""
    names = list(dict.fromkeys(cell.name for cell in results.turns))
    rows = []
    for case in results.cases():
        cells = [Cell(case, name) for name in names]
        times = [f"{results.median(cell):.4g}" if cell in results.turns else "" for cell in cells]
        ratios = [results.ratio(cell, cells[0]) for cell in cells[1:]]
        rows.append([case_name(case), *times, *("" if value is None else ratio(value) for value in ratios)])
    return table([title, *names, *(f"{name}/{names[0]}" for name in names[1:])], rows, texts=1)


def targets(runs: Sequence[Run]) -> str:
    """Return the table of targets: the worst figure in each run and its cell, and whether every run met the target."""
    rows = []
    for target in TARGETS:
        verdicts = [judge(target, run.results) for run in runs]
        known = [verdict for verdict in verdicts if verdict.met is not None]
        if not known:
            continue
        cell = min(known, key=lambda one: one.met is True).cell
        figures = ["-" if one.worst is None else figure(target, one.worst) for one in verdicts]
        met = "met" if all(verdict.met for verdict in known) else "missed"
        rows.append([met, target.row, target.against, target.wanted, case_name(cell.case) if cell else "", *figures])
    headings = ["", "case", "against", "wanted", "worst at", *(f"{run.began:%m-%d %H:%M}" for run in runs)]
    return table(headings, rows, texts=5)


def figure(target: Target | Limit, worst: float) -> str:
    """Return the worst figure of a run as its target has it."""
    return f"{worst:.2f} {target.unit}" if isinstance(target, Limit) else ratio(worst, target.least)


def slower(runs: Sequence[Run]) -> str:
    """Return the table of cells in which RankMesh took longer than another library, by the median of all runs."""
    rows = []
    for ours, theirs in (("rankmesh-shm", "gloo"), ("rankmesh-shm", "mpi"), ("rankmesh-tcp", "gloo")):
        for case in dict.fromkeys(case for run in runs for case in run.results.cases()):
            pairs = [run.results.ratio(Cell(case, theirs), Cell(case, ours)) for run in runs]
            known = [value for value in pairs if value is not None]
            if known and median(known) < 1:
                figures = ["-" if value is None else ratio(value) for value in pairs]
                rows.append([IMPLEMENTATIONS[ours].title, case_name(case), IMPLEMENTATIONS[theirs].title, *figures])
    return table(["", "case", "against", *(f"{run.began:%m-%d %H:%M}" for run in runs)], rows, texts=3)


def measured_on(run: Run) -> str:
    """Return the sentences that name the machine and the versions of a run."""
    machine = "; ".join(f"{name}: {what}" for name, what in run.machine.items())
    return f"Measured on {machine}. Versions: {', '.join(dict.fromkeys(run.results.versions.values()))}."


def chart(results: Results, path: Path, ranks: Sequence[int] = (2, 4)) -> None:
    """Draw the time of an all_reduce over the array's size, one panel a number of ranks, as SVG."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "rankmesh"  # the same figures give the same file
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(ranks), figsize=(11, 4.5), sharey=True, layout="constrained")
    for panel, count in zip(panels, ranks, strict=True):
        for name in COMPARED:
            cells = [Cell(case, name) for case in results.cases() if case == ("all_reduce", count, case.nbytes, 0)]
            points = sorted((cell.case.nbytes, results.median(cell)) for cell in cells if cell in results.turns)
            if points:
                style = "--" if name in ("gloo", "mpi") else "-"
                panel.loglog(*zip(*points, strict=True), style, marker=".", label=IMPLEMENTATIONS[name].title)
        panel.set(title=f"all_reduce, {count} ranks", xlabel="bytes of the array")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("microseconds a call")
    panels[0].legend()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def write(runs: Sequence[Run], path: Path = PAGE) -> None:
    """Write the page, its chart (of the last run) and the JSON files of the runs into a folder of the same name."""
    runs = sorted(runs, key=lambda run: run.began)
    folder = path.with_suffix("")
    folder.mkdir(exist_ok=True)
    chart(runs[-1].results, folder / "all_reduce.svg")
    files = [folder / f"run-{number}.json" for number in range(1, len(runs) + 1)]
    for file, run in zip(files, runs, strict=True):
        file.write_text(json.dumps(run.as_json(), separators=(",", ":")) + "\n")
    others = sorted(each for each in path.parent.glob("benchmarks-on-*.md") if each != path)
    notes = [f"Another processor's figures: [{other.stem}]({other.name})." for other in others]
    notes += dict.fromkeys(line for run in runs for line in run.left_out)
    links = ", ".join(f"[{file.name}]({folder.name}/{file.name})" for file in files)
    path.write_text(
        f"# Benchmarks\n\nWritten by `make bench`; do not edit. {_METHOD}\n\n{measured_on(runs[-1])}\n\n"
        + "".join(f"{line}\n\n" for line in notes)
        + f"![Time of an all_reduce]({folder.name}/all_reduce.svg)\n\n{targets(runs)}\n\n"
        f"## Slower than others\n\nAll cells in which RankMesh is slower, by the median of the runs.\n\n"
        f"{slower(runs)}\n\nEvery timing of every case: {links}.\n"
    )


_METHOD = (
    "Timed are the calls a user makes from Python: RankMesh on NumPy arrays, torch.distributed on CPU tensors (gloo), "
    "mpi4py's buffer calls (Open MPI). Arrays are float32; sizes are of the larger array of a call. The ranks of all "
    "implementations live side by side on one machine and take turns, round by round; every result is checked before "
    "and after it is timed; the slowest rank counts. A ratio is their time divided by ours, the median of the rounds' "
    "ratios: above 1x, RankMesh is faster. A row shows its worst cell, and is met if every cell of every run is."
)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description="Write the page of some runs.")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="a run, from python -m benchmarks --json")
    parser.add_argument("--page", type=Path, default=PAGE, help="default: docs/benchmarks.md")
    options = parser.parse_args()
    write([Run.read(path) for path in options.files], options.page)
