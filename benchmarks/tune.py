"""Find from how many bytes on the next algorithm of each row of the table is faster: ``python -m benchmarks.tune``.

Every row of ``rankmesh_agent.collectives.select`` with more than one algorithm is measured, each algorithm on every
size it can take, through the public call. Without ``--write`` only the difference to the limits in use is shown.
"""

from __future__ import annotations

import argparse
import difflib
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import combinations_with_replacement
from pathlib import Path
from statistics import median
from typing import NamedTuple, get_args

from benchmarks.machine import describe
from benchmarks.options import names_of, numbers, progress
from benchmarks.peers import PEERS
from benchmarks.plan import KIB, Effort
from benchmarks.run import Say, in_turn
from benchmarks.tables import microseconds, size, table
from benchmarks.team import PeerFailedError, Team
from rankmesh_agent.collectives import thresholds as limits_module
from rankmesh_agent.collectives.select import Medium, candidates, table_row
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.wire.ops import OpType

Limits = Mapping[tuple[str, str], Mapping[str, Mapping[int, int]]]
RANKS = (2, 4)
SIZES = tuple(KIB << power for power in range(14))
SLOT = Settings().slot_bytes
"""Bytes of a slot by default: over shared memory all algorithms but a row's last need it."""
PROGRAM = "benchmarks.tune_rank"
MEASURED_BY = {
    "segment": PEERS["rankmesh-shm"],
    "reads": PEERS["rankmesh-shm"],
    "registered": PEERS["rankmesh-registered"],
    "link": PEERS["rankmesh-tcp"],
}
"""Who shows each medium on one host; other media are left alone."""
EFFORT = Effort(rounds=5, repetitions=2, seconds=0.005)


class Row(NamedTuple):
    """A row of the table of ``select``."""

    kind: OpType
    medium: Medium

    @property
    def key(self) -> tuple[str, str]:
        """What it is called in ``limits``."""
        return self.kind.name, self.medium

    @property
    def algorithms(self) -> list[tuple[float, str]]:
        """What each algorithm can take at all, and its name, in the table's order."""
        return [(most, one.__name__) for most, one in candidates(self.kind, self.medium, SLOT)]


class Sample(NamedTuple):
    """Seconds a call takes by each algorithm, in the row's order, when ranks contribute so many bytes."""

    nbytes: int
    seconds: Sequence[float]


def rows() -> list[Row]:
    """Return the rows that have a choice and a way to be measured on one host."""
    found = []
    for medium in get_args(Medium):
        for kind in OpType:
            try:
                choice = candidates(kind, medium)
            except KeyError:  # no collective
                continue
            if medium in MEASURED_BY and table_row(kind, medium) == medium and len(choice) > 1:
                found.append(Row(kind, medium))
    return found


def switching(algorithms: Sequence[tuple[float, str]], samples: Sequence[Sample]) -> dict[str, int]:
    """Return the limits of all algorithms but the last: the largest size at which each is taken, -1 if at none.

    They are those with which the samples lose least against each one's best algorithm, in the geometric mean; twice
    the time is the most that counts, so that a disturbed sample moves no limit far.

    Args:
        algorithms: what each can take at all, and its name.
        samples: by bytes; infinite where an algorithm cannot be used.
    """
    samples = sorted(samples)

    def loss(sample: Sample, number: int) -> float:
        times = sample.seconds[number] / min(sample.seconds)
        return math.inf if math.isinf(times) else math.log(min(times, 2.0))

    def cost(ends: Sequence[int]) -> float:
        bounds = zip([0, *ends], [*ends, len(samples)], strict=True)
        return sum(loss(sample, number) for number, (begin, end) in enumerate(bounds) for sample in samples[begin:end])

    choices = combinations_with_replacement(range(len(samples) + 1), len(algorithms) - 1)
    best, begin, limits = min(choices, key=cost), 0, {}
    for (_, name), end in zip(algorithms, best, strict=False):
        limits[name] = samples[end - 1].nbytes if end > begin else -1
        begin = end
    return limits


def measure(team: Team, row: Row, sizes: Iterable[int]) -> list[Sample] | None:
    """Return a row's samples with a team; None where the team has not got the medium."""
    operation = row.kind.name.lower()
    samples = []
    for nbytes in sizes:
        answers = team.ask(f"{operation} {row.medium} ?", nbytes, 1, 1)
        if row.medium == "reads" and not all(reads for _, reads in answers):
            return None
        contributed = int(max(counted for counted, _ in answers))
        able = [name for most, name in row.algorithms if contributed <= most]
        timings: dict[str, list[float]] = {name: [] for name in able}
        calls: dict[str, int] = {}
        for number in range(EFFORT.rounds):
            for name in in_turn(able, number):
                order = f"{operation} {row.medium} {name}"
                if name not in calls:
                    calls[name] = EFFORT.calls(min(team.measure(order, nbytes, 3, repetitions=2)))
                timings[name] += team.measure(order, nbytes, calls[name], EFFORT.repetitions)
        medians = [median(timings[name]) if name in timings else math.inf for _, name in row.algorithms]
        samples.append(Sample(contributed, medians))
    return samples


def tune(
    wanted: Sequence[Row], ranks: Sequence[int], sizes: Sequence[int], say: Say
) -> dict[tuple[str, str], dict[str, dict[int, int]]]:
    """Measure rows and return their limits.

    Raises:
        PeerFailedError: ranks did not start, died, or an algorithm gave a wrong result.
    """
    found: dict[tuple[str, str], dict[str, dict[int, int]]] = {}
    for peer in dict.fromkeys(MEASURED_BY[row.medium].name for row in wanted):
        for count in ranks:
            with Team(replace(PEERS[peer], program=PROGRAM), count) as team:
                for row in [row for row in wanted if MEASURED_BY[row.medium].name == peer]:
                    samples = measure(team, row, sizes if row.kind is not OpType.BARRIER else [0])
                    if samples is None:
                        say(f"{row.key}: left as it is: the kernel does not let ranks read each other's memory")
                        continue
                    say(f"{row.kind.name} over {row.medium}, {count} ranks, microseconds\n{_shown(row, samples)}")
                    for name, limit in switching(row.algorithms, samples).items():
                        found.setdefault(row.key, {}).setdefault(name, {})[count] = limit
    return found


def written(limits: Limits, how: str) -> str:
    """Return the text of ``limits.py``.

    Args:
        limits: all of them.
        how: a sentence on what they were measured.
    """
    lines = []
    for key, by_name in sorted(limits.items()):
        inner = ", ".join(f'"{name}": {dict(sorted(sizes.items()))}' for name, sizes in by_name.items())
        line = f'    ("{key[0]}", "{key[1]}"): {{{inner}}},'
        if len(line) > 120:
            inner = "".join(f'        "{name}": {dict(sorted(sizes.items()))},\n' for name, sizes in by_name.items())
            line = f'    ("{key[0]}", "{key[1]}"): {{\n{inner}    }},'
        lines.append(line)
    return _FILE.format(how=how, lines="\n".join(lines))


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune as the command line (None: this process's) says and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the limits instead of showing what would change")
    known = {"/".join(row.key): row for row in rows()}
    only = "rows to measure; the others stay as they are"
    parser.add_argument("--only", type=names_of(known), default=list(known), metavar="ALL_REDUCE/link,...", help=only)
    parser.add_argument("--ranks", type=numbers, default=RANKS, metavar="NUMBER,...")
    parser.add_argument("--sizes", type=numbers, default=SIZES, metavar="BYTES,...")
    options = parser.parse_args(arguments)
    try:
        found = tune([known[name] for name in options.only], options.ranks, options.sizes, progress)
    except PeerFailedError as error:
        print(error, file=sys.stderr)
        return 1
    path = Path(str(limits_module.__file__))
    machine = describe()
    how = f"{datetime.now(UTC):%Y-%m-%d} on {machine['processor']}, {machine['kernel']}"
    before, after = path.read_text(), written(merged(limits_module.LIMITS, found), how)
    if options.write:
        path.write_text(after)
        progress(f"written: {path}")
    else:
        sys.stdout.writelines(
            difflib.unified_diff(before.splitlines(True), after.splitlines(True), str(path), "measured now")
        )
    return 0


def merged(before: Limits, found: Limits) -> Limits:
    """Return the limits with what was found in place of what was there for the same row and ranks."""
    limits = {key: {name: dict(sizes) for name, sizes in by_name.items()} for key, by_name in before.items()}
    for key, by_name in found.items():
        old = limits.get(key, {})
        limits[key] = {name: {**old.get(name, {}), **sizes} for name, sizes in by_name.items()}
    return limits


def _shown(row: Row, samples: Sequence[Sample]) -> str:
    headings = ["bytes a rank", *(name for _, name in row.algorithms)]
    lines = [
        [size(sample.nbytes), *("" if math.isinf(s) else microseconds(1e6 * s) for s in sample.seconds)]
        for sample in samples
    ]
    return table(headings, lines)


_FILE = '''"""Up to how many bytes a rank contributes the table of ``select`` takes each algorithm, -1 for never.

Written by ``python -m benchmarks.tune --write``: the sizes from which the next algorithm was measured to be faster. An
algorithm that is not here is limited by what ``select`` says alone; no limit here goes beyond that.

Measured: {how}.
Rows that one host cannot show, or whose medium was not there, are as they were.
"""

from __future__ import annotations

# (collective, medium): {{algorithm: {{ranks in the group: bytes}}}}
LIMITS: dict[tuple[str, str], dict[str, dict[int, int]]] = {{
{lines}
}}
'''


if __name__ == "__main__":
    sys.exit(main())
