"""The quick run, less than a minute: ``python -m benchmarks.quick``, with ``--json`` for programs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from benchmarks.cases import QUICK, quick
from benchmarks.figures import timings
from benchmarks.implementations import IMPLEMENTATIONS
from benchmarks.results import Run
from benchmarks.session import Session
from benchmarks.targets import TARGETS, judge

COMPARED = ("rankmesh-shm", "rankmesh-tcp", "gloo", "mpi")


def as_json(run: Run) -> dict[str, Any]:
    """Return the run, with the targets that it measured."""
    verdicts = [(target, judge(target, run.results)) for target in TARGETS]
    targets = [
        {"row": target.row, "against": target.against, "wanted": target.wanted, "worst": round(worst, 3), "met": met}
        for target, (met, worst, _) in verdicts
        if worst is not None
    ]
    return {**run.as_json(), "targets": targets}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quick", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead of a table")
    options = parser.parse_args(arguments)
    run = Session(quick(), lambda case: QUICK).measure([IMPLEMENTATIONS[name] for name in COMPARED])
    print(json.dumps(as_json(run), indent=1) if options.json else timings(run.results))


if __name__ == "__main__":
    main()
