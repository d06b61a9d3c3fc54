"""Tokens a second of GPT-2, split over two ranks: ``python -m benchmarks.inference --page docs/torch.md``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from benchmarks.cases import Case, Cell
from benchmarks.figures import measured_on, table
from benchmarks.implementations import IMPLEMENTATIONS, available
from benchmarks.machine import describe
from benchmarks.results import Results, Run
from benchmarks.rounds import progress, rotated
from benchmarks.workers import MeasurementError, WorkerGroup

_SHM, _PROGRAM = IMPLEMENTATIONS["rankmesh-shm"], "benchmarks.inference_worker"
_THREADS = {**_SHM.environment, "OMP_NUM_THREADS": "2"}
MEASURED = [
    (replace(_SHM, name="one-rank", title="one rank"), 1),
    (replace(_SHM, name="two-threads", title="one rank, two threads", environment=_THREADS), 1),
    *((IMPLEMENTATIONS[name], 2) for name in ("rankmesh-shm", "gloo", "mpi")),
]
"""What sums the arrays, and of how many ranks."""
PARTS = ("token", "communication", "all_reduce")
TOLERANCE = 1e-3
"""Largest difference of a logit that another order of summation may cause."""
HEADINGS = ["", "ranks", "tokens/s", "ms a token", "in all_reduce", "share", "µs an all_reduce"]
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def cells(name: str, ranks: int) -> list[Cell]:
    """Return the cells of an implementation, one a part of the time."""
    return [Cell(Case(f"inference_{part}", ranks), name) for part in PARTS]


def measure(shape: Sequence[int], tokens: int, rounds: int) -> Run:
    """Measure all in turns; the shape is that of ``random_weights``."""
    began, clock, machine, results = datetime.now(UTC), time.monotonic(), describe(), Results()
    here, left_out = available(one for one, _ in MEASURED)
    with ExitStack() as stack:
        groups = []
        for one, ranks in MEASURED:
            if one in here:
                progress(f"starting {one.title}")
                started = replace(one, program=_PROGRAM, arguments=tuple(map(str, shape)))
                groups.append(stack.enter_context(WorkerGroup(started, ranks)))
        results.versions = {group.implementation.name: group.version for group in groups}
        for number in range(rounds):
            progress(f"round {number + 1} of {rounds}")
            texts = [turn(group, tokens, results) for group in rotated(groups, number)]
            if max(np.abs(text - texts[0]).max() for text in texts) > TOLERANCE:
                raise MeasurementError("Some ranks generate another text than others.")
    return Run(results, machine, began, (time.monotonic() - clock) / 60, left_out)


def turn(group: WorkerGroup, tokens: int, results: Results) -> np.ndarray:
    """Let the ranks generate, add the microseconds of a token, and return the tokens with their logits."""
    seconds, spent, texts = zip(*group.ask("generate", 0, tokens, 1), strict=True)
    by_token = 1e6 * np.reshape(spent, (group.ranks, tokens, -1))
    sums = by_token[:, :, :-1].min(axis=0)  # of the rank that comes last: the others have waited for it
    figures = 1e6 * max(seconds) / tokens, by_token.sum(axis=2).mean(), np.median(sums)
    for cell, figure in zip(cells(group.implementation.name, group.ranks), figures, strict=True):
        results.add(cell, [float(figure)], tokens)
    return np.array(texts[0])


def rows(results: Results) -> list[list[str]]:
    """Return a row of medians for all that was measured."""
    found = []
    for one, ranks in MEASURED:
        if cells(one.name, ranks)[0] in results.turns:
            token, communication, call = map(results.median, cells(one.name, ranks))
            row = [one.title, str(ranks), f"{1e6 / token:.1f}", f"{token / 1000:.2f}"]
            parts = [f"{communication / 1000:.2f} ms", f"{communication / token:.1%}", f"{call:.1f}"]
            found.append([*row, *(parts if ranks > 1 else [""] * len(parts))])
    return found


def page(text: str, run: Run) -> str:
    """Return the page with a run's figures between its markers."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{measured_on(run)}\n\n{table(HEADINGS, rows(run.results), texts=1)}\n{END}{tail}"


def main() -> None:
    """Measure, print the figures, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.inference", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each library")
    parser.add_argument("--tokens", type=int, default=32, help="in a turn")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12, help="each 64 wide")
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the figures into docs/torch.md")
    options = parser.parse_args()
    run = measure((options.layers, options.heads, options.vocabulary), options.tokens, options.rounds)
    for line in run.left_out:
        progress(line)
    print(table(HEADINGS, rows(run.results), texts=1))
    if options.page is not None:
        options.page.write_text(page(options.page.read_text(), run))


if __name__ == "__main__":
    main()
