"""The quick form, under a minute: ``python -m benchmarks.quick``, with ``--json`` for programs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.compact import compact
from benchmarks.options import progress
from benchmarks.peers import PEERS
from benchmarks.plan import QUICK, quick
from benchmarks.results import Run
from benchmarks.session import Session
from benchmarks.targets import LIMITS, TARGETS, judge
from benchmarks.team import PeerFailedError

COMPARED = ("rankmesh-shm", "rankmesh-tcp", "gloo", "mpi")


def as_json(run: Run) -> dict[str, Any]:
    """Return the run with its ratios, and the targets as far as it has their cells."""
    results = run.results
    ratios = []
    for cell in results.turns:
        for ours in ("rankmesh-shm", "rankmesh-tcp", "rankmesh-store"):
            value = None if cell.peer == ours else results.ratio(cell, cell._replace(peer=ours))
            if value is not None and not cell.peer.startswith("rankmesh"):
                ratios.append({**cell.case._asdict(), "theirs": cell.peer, "ours": ours, "ratio": round(value, 3)})
    targets = []
    for target in (*TARGETS, *LIMITS):
        verdict = judge(target, results)
        if verdict.met is not None and verdict.value is not None:
            one = {"row": target.row, "wanted": target.wanted, "worst": round(verdict.value, 3), "met": verdict.met}
            targets.append({**one, "against": getattr(target, "against", None)})
    return {**run.as_json(), "ratios": ratios, "targets": targets}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure as the command line (None: this process's) says, print it and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quick", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead of a table")
    options = parser.parse_args(arguments)
    peers = [PEERS[name] for name in COMPARED]
    try:
        run = Session(quick(), lambda case: QUICK, store_rounds=1).measure(peers, progress)
    except PeerFailedError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(as_json(run), indent=1) if options.json else compact(run.results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
