"""Measure everything and write ``docs/benchmarks.md``, or a part and print it: ``python -m benchmarks``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks import ddp, gpu, gpu_report, page
from benchmarks.compact import compact
from benchmarks.operations import OPERATIONS
from benchmarks.options import names_of, number, numbers, progress
from benchmarks.peers import PEERS
from benchmarks.plan import RANKS, SIZES, Effort, cases, full, full_effort
from benchmarks.session import Session
from benchmarks.team import PeerFailedError

EXAMPLE = "for a part: python -m benchmarks --only all_reduce --ranks 2 --sizes 4,65536 --peers rankmesh-shm,gloo"
STORES, JOIN, DDP, MPI, GPU = "stores", "join", "ddp", "mpi", "gpu"
STORE_ROUNDS, JOIN_ROUNDS, DDP_ROUNDS = 7, 3, 5
OF_A_PART = {"ranks": RANKS, "sizes": SIZES, "peers": tuple(PEERS), "rounds": 7, "budget": 10.0, "seconds": 0.03}
"""Options that choose within a part, and what they are when they are not given."""


def main(arguments: list[str] | None = None) -> int:
    """Measure as the command line (None: this process's) says and return the exit code."""
    options = parse(arguments)
    whole = options.only is None
    session = (
        Session(full(), full_effort, STORE_ROUNDS, JOIN_ROUNDS, dict.fromkeys(ddp.RANKS, DDP_ROUNDS))
        if whole
        else part(options)
    )
    try:
        run = session.measure([PEERS[name] for name in options.peers], progress)
    except PeerFailedError as error:
        print(error, file=sys.stderr)
        return 1
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(run.as_json(), indent=1) + "\n")
        progress(f"written: {options.json}")
    elif whole:
        page.write([run])
        progress(f"written: {page.PAGE}")
    if options.only != [GPU]:
        print(compact(run.results))
    print(gpu_report.section(run), end="")
    return 0


def part(options: argparse.Namespace) -> Session:
    """Return what is measured when a part is chosen."""
    operations = [name for name in options.only if name in OPERATIONS]
    effort = Effort(options.rounds, least=min(3, options.rounds), budget=options.budget, seconds=options.seconds)
    return Session(
        cases(operations, options.ranks, options.sizes),
        lambda case: effort,
        store_rounds=options.rounds if STORES in options.only else 0,
        join_rounds=options.rounds if JOIN in options.only else 0,
        ddp_rounds={ranks: options.rounds for ranks in options.ranks if ranks in ddp.RANKS and DDP in options.only},
        mpi_rounds=options.rounds if MPI in options.only else 0,
        gpus=gpu.Plan(
            options.rounds,
            [ranks for ranks in options.ranks if ranks in gpu.RANKS],
            gpu.SIZES if options.sizes is SIZES else options.sizes,
        )
        if GPU in options.only
        else None,
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line (None: this process's); exit with a line on standard error when it makes no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure RankMesh, gloo and Open MPI in turns, all of it in about 20 minutes.",
        epilog=EXAMPLE,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every timing there, and no page")
    known = [*OPERATIONS, STORES, DDP, MPI, GPU, JOIN]
    choice = parser.add_argument_group("a part of it")
    choice.add_argument("--only", type=names_of(known), metavar="PART,...", help=", ".join(known))
    choice.add_argument("--ranks", type=numbers, metavar="NUMBER,...")
    choice.add_argument("--sizes", type=numbers, metavar="BYTES,...")
    choice.add_argument("--peers", type=names_of(PEERS), metavar="PEER,...", help=", ".join(PEERS))
    choice.add_argument("--rounds", type=number, help=f"turns each peer gets at most (default: {OF_A_PART['rounds']})")
    choice.add_argument(
        "--budget", type=float, help=f"seconds for a case, of 3 rounds at least (default: {OF_A_PART['budget']:g})"
    )
    choice.add_argument("--seconds", type=float, help=f"of a timing (default: {OF_A_PART['seconds']})")
    options = parser.parse_args(arguments)
    given = [f"--{name}" for name in OF_A_PART if getattr(options, name) is not None]
    if given and options.only is None:
        parser.error(f"{', '.join(given)}: a part of what? --only says it")
    for name, value in OF_A_PART.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


if __name__ == "__main__":
    sys.exit(main())
