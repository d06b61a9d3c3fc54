"""Measure, print the page and write it to ``docs/benchmarks.md``: ``python -m benchmarks``, from the project's root."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.machine import Bystanders, describe
from benchmarks.peers import PEERS, Peer
from benchmarks.plan import FULL, QUICK
from benchmarks.report import Circumstances, as_json, page
from benchmarks.run import run
from benchmarks.team import ROOT, PeerFailedError

PAGE = ROOT / "docs" / "benchmarks.md"


def main(arguments: list[str] | None = None) -> int:
    """Measure as the command line (None: this process's) says and return the exit code."""
    options = parse(arguments)
    peers, left_out = available(PEERS)
    for line in left_out:
        progress(line)
    bystanders = Bystanders()
    try:
        results = run(peers, QUICK if options.quick else FULL, progress)
    except PeerFailedError as error:
        print(error, file=sys.stderr)
        return 1
    others = f"{bystanders.cores():.2f} cores, on average, while this was measured"
    circumstances = Circumstances({**describe(), "others used": others}, datetime.now(UTC), left_out)
    text = page(results, circumstances)
    print(text)
    out = options.out or (None if options.quick else PAGE)
    if out is not None:
        out.write_text(text)
        progress(f"written: {out}")
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(results, circumstances), indent=1) + "\n")
        progress(f"written: {options.json}")
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line (None: this process's)."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure all_reduce of RankMesh, gloo and Open MPI in turns. Takes about four minutes.",
    )
    parser.add_argument("--quick", action="store_true", help="under a minute; writes no page unless --out says where")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the page goes (default: docs/benchmarks.md)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every timing as JSON")
    return parser.parse_args(arguments)


def available(peers: tuple[Peer, ...]) -> tuple[list[Peer], list[str]]:
    """Return the peers that are installed, and a line about each that is not."""
    here, left_out = [], []
    for peer in peers:
        missing = peer.missing()
        if missing is None:
            here.append(peer)
        else:
            left_out.append(f"{peer.title} is left out: {missing} is not installed.")
    return here, left_out


def progress(line: str) -> None:
    """Say how far we are, where it does not mix with the page."""
    print(f"[benchmarks] {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
