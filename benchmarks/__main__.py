"""Measure everything, or a part: ``python -m benchmarks``. Prints a table and writes every timing with ``--json``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks import gpu
from benchmarks.cases import RANKS, SIZES, Effort, cases, full, full_effort
from benchmarks.figures import timings
from benchmarks.implementations import COMPARED, IMPLEMENTATIONS
from benchmarks.operations import OPERATIONS
from benchmarks.session import Session

EXAMPLE = "for a part: python -m benchmarks --only all_reduce --ranks 2 --sizes 4 65536 --peers rankmesh-shm gloo"
PARTS = ("ddp", "gpu", "joins")


def main(arguments: list[str] | None = None) -> None:
    """Measure as the command line directs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, epilog=EXAMPLE)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every timing there")
    parser.add_argument("--only", nargs="+", choices=[*OPERATIONS, *PARTS], help="default: everything")
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, metavar="BYTES")
    parser.add_argument("--busy", nargs="+", type=int, default=(0,), help="processes that compute beside the ranks")
    parser.add_argument("--peers", nargs="+", choices=IMPLEMENTATIONS, default=COMPARED)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each implementation, at most")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds for a case, of 3 rounds at least")
    parser.add_argument("--seconds", type=float, default=0.03, help="length of a timing")
    parser.add_argument("--processor", action="store_true", help="measure the processor time of all ranks instead")
    options = parser.parse_args(arguments)
    if options.only is None:
        session = Session(full(), full_effort, joins=3, ddp=3)
    else:
        least = min(3, options.rounds)
        effort = Effort(options.rounds, least, options.budget, seconds=options.seconds, processor=options.processor)
        session = Session(
            cases([name for name in options.only if name in OPERATIONS], options.ranks, options.sizes, options.busy),
            lambda case: effort,
            **{part: options.rounds for part in PARTS if part in options.only},
            gpu_ranks=gpu.RANKS if options.ranks is RANKS else options.ranks,
            gpu_sizes=gpu.SIZES if options.sizes is SIZES else options.sizes,
        )
    run = session.measure([IMPLEMENTATIONS[name] for name in options.peers])
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(run.as_json(), indent=1) + "\n")
    print(timings(run.results, "processor µs" if options.processor else "median µs"))


if __name__ == "__main__":
    main()
