"""Write the page from the files of one or more runs: ``python -m benchmarks.page run1.json run2.json``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.charts import drawn
from benchmarks.report import page
from benchmarks.results import Run, latest
from benchmarks.team import ROOT

PAGE = ROOT / "docs" / "benchmarks.md"


def write(runs: Sequence[Run], path: Path = PAGE) -> None:
    """Write the page, and its charts, which are of the latest figures, into a folder of the same name."""
    runs = sorted(runs, key=lambda run: run.began)
    folder = path.with_suffix("")
    folder.mkdir(exist_ok=True)
    charts = drawn(latest(runs))
    for old in folder.glob("*.svg"):
        old.unlink()
    for name, (_, svg) in charts.items():
        (folder / name).write_text(svg)
    path.write_text(page(runs, [(title, f"{folder.name}/{name}") for name, (title, _) in charts.items()]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page as the command line (None: this process's) says and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN.json", help="of python -m benchmarks --json")
    parser.add_argument("--out", type=Path, default=PAGE, metavar="FILE.md", help="default: docs/benchmarks.md")
    options = parser.parse_args(arguments)
    write([Run.from_json(json.loads(path.read_text())) for path in options.runs], options.out)
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
