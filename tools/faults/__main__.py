"""``python -m tools.faults``: fault runs, and a table of what became of them; ``make test-faults`` runs it."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support import rank_server

from tools.faults.kinds import KINDS, specify
from tools.faults.run import Outcome, Run

HEADINGS = ("kind", "runs", "hangs", "wrong", "named %", "median s", "max s", "leaks", "recovered %")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print the table, and return 1 if something was not as promised."""
    options = _parse(arguments)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has it ignored, launchers included
    kinds = options.kind or [name for name, kind in KINDS.items() if kind.gloo or options.library != "gloo"]
    if os.geteuid() or not (shutil.which("ip") and shutil.which("unshare")):
        left_out = [kind for kind in kinds if KINDS[kind].namespaces]
        kinds = [kind for kind in kinds if kind not in left_out]
        if left_out:
            print(f"left out: {', '.join(left_out)}: they need root, iproute2 and unshare, for namespaces")
    if options.seed is not None:
        wanted = [(options.seed, kind) for kind in kinds]
    else:
        wanted = [(seed, kinds[seed % len(kinds)]) for seed in range(options.first, options.first + options.seeds)]
    lock = threading.Lock()
    outcomes: list[Outcome] = []

    def one(seed: int, kind: str) -> None:
        outcome = Run(specify(seed, kind, options.library)).run()
        with lock:
            outcomes.append(outcome)
            _tell(outcome, options.verbose, f"{len(outcomes)}/{len(wanted)}")
            if options.logs and outcome.findings:
                path = Path(options.logs) / f"{kind.replace('/', '').replace(' ', '-')}-{seed}.log"
                path.write_text("\n".join([*outcome.findings, outcome.log]))

    began = time.monotonic()
    try:
        with ThreadPoolExecutor(options.parallel) as pool:
            for done in [pool.submit(one, seed, kind) for seed, kind in wanted]:
                done.result()
    finally:
        rank_server.close_all()
    print(f"\n{len(outcomes)} runs in {time.monotonic() - began:.0f} s, {options.parallel} at a time\n")
    print("\n".join(table(outcomes, [kind for kind in KINDS if kind in kinds])))
    if options.json:
        Path(options.json).write_text(json.dumps([vars(outcome) for outcome in outcomes]))
    return int(any(outcome.findings for outcome in outcomes))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make test-faults", description=__doc__)
    parser.add_argument("--seeds", type=int, default=len(KINDS) * 2, help="number of runs; the kinds take turns")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run this seed alone, of each --kind")
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="only this kind; may be repeated")
    parser.add_argument("--library", choices=("rankmesh", "gloo"), default="rankmesh")
    parser.add_argument("--parallel", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="runs at a time")
    parser.add_argument("--json", help="write all outcomes to this file")
    parser.add_argument("--logs", help="write what happened in each run with findings to a file in this folder")
    parser.add_argument("-v", "--verbose", action="store_true", help="print program, fault and events of every run")
    return parser.parse_args(arguments)


def _tell(outcome: Outcome, verbose: bool, count: str) -> None:
    """Print a run that went wrong, or every one."""
    findings = outcome.findings
    state = "ok" if not findings else f"{len(findings)} findings"
    if verbose or findings:
        print(f"[{count}] --seed {outcome.seed} --kind '{outcome.kind}': {state} ({outcome.seconds:.1f} s)")
        print("".join(f"    {finding[:700]}\n" for finding in findings), end="")
    if verbose:
        print(outcome.log, flush=True)
    sys.stdout.flush()


def table(outcomes: Iterable[Outcome], kinds: Sequence[str]) -> list[str]:
    """Return the lines of the table by kind, in Markdown."""
    outcomes = list(outcomes)
    rows = [_row(kind, [each for each in outcomes if each.kind == kind]) for kind in kinds]
    rows.append(_row("all", outcomes))
    return [
        "| " + " | ".join(HEADINGS) + " |", "|---" + "|---:" * (len(HEADINGS) - 1) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]  # fmt: skip


def _row(kind: str, runs: Sequence[Outcome]) -> list[str]:
    errors = [error for run in runs for error in run.errors]
    seconds = [error["seconds"] for error in errors if error["seconds"] is not None]
    expected = len(errors) + sum(run.missing for run in runs)
    unnamed = sum(len(run.unnamed) for run in runs)
    recoveries = sum(run.recoveries for run in runs)
    lost = sum(len(run.unrecovered) for run in runs)
    return [
        kind,
        str(len(runs)),
        str(sum(bool(run.hangs) for run in runs)),
        str(sum(bool(run.wrong) for run in runs)),
        _percent(max(expected - unnamed, 0), expected),
        f"{statistics.median(seconds):.2f}" if seconds else "-",
        f"{max(seconds):.2f}" if seconds else "-",
        str(sum(bool(run.leaks) for run in runs)),
        _percent(recoveries - lost, recoveries),
    ]


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.4g}" if whole else "-"


if __name__ == "__main__":
    sys.exit(main())
