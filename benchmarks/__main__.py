"""Measure, print the page and write it to ``docs/benchmarks.md``: ``python -m benchmarks``, from the project's root."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from benchmarks.compact import compact
from benchmarks.operations import OPERATIONS
from benchmarks.peers import PEERS, available
from benchmarks.plan import RANKS, SIZES, Effort, cases
from benchmarks.run import run
from benchmarks.team import PeerFailedError


def main(arguments: list[str] | None = None) -> int:
    """Measure as the command line (None: this process's) says and return the exit code."""
    options = parse(arguments)
    peers, left_out = available(PEERS[name] for name in options.peers)
    for line in left_out:
        progress(line)
    effort = Effort(options.rounds, least=min(3, options.rounds), budget=options.budget, seconds=options.seconds)
    try:
        results = run(peers, cases(options.only, options.ranks, options.sizes), lambda case: effort, progress)
    except PeerFailedError as error:
        print(error, file=sys.stderr)
        return 1
    print(compact(results, peers))
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line (None: this process's)."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure RankMesh, gloo and Open MPI in turns. With a part chosen, print a table of that part.",
    )
    part = parser.add_argument_group("a part")
    part.add_argument("--only", type=names_of(OPERATIONS), default=list(OPERATIONS), metavar="OPERATION,...")
    part.add_argument("--ranks", type=numbers, default=RANKS, metavar="NUMBER,...")
    part.add_argument("--sizes", type=numbers, default=SIZES, metavar="BYTES,...")
    part.add_argument("--peers", type=names_of(PEERS), default=list(PEERS), metavar="PEER,...")
    part.add_argument("--rounds", type=int, default=7, help="turns each peer gets at most (default: %(default)s)")
    part.add_argument("--budget", type=float, default=10, help="seconds for a case, of 3 rounds at least")
    part.add_argument("--seconds", type=float, default=0.03, help="of a timing (default: %(default)s)")
    return parser.parse_args(arguments)


def names_of(known: dict[str, object]) -> Callable[[str], list[str]]:
    """Return a reader of names, separated by commas."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return names

    return read


def numbers(text: str) -> list[int]:
    """Read whole numbers, separated by commas."""
    return [int(number) for number in text.split(",")]


def progress(line: str) -> None:
    """Say how far we are, where it does not mix with the page."""
    print(f"[benchmarks] {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
