"""Recoveries of a training: ``python -m tools.faults.recovery`` kills a rank in each round, and times the next step.

A round starts four ranks that train on the digits, kills one, or a host with two, at a random moment, and waits for the
end. The job must end as an undisturbed one does, and leave nothing behind. The rounds are one after the other, each
drawn from its seed, and the kinds take turns. ``--page FILE...`` writes docs/fault-tolerance.md's table from results of
``--json``.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import platform
import random
import re
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from support.host_commands import Hosts, why_not
from support.me import wait_until
from support.network_hosts import network_hosts
from support.processes import Ranks, free_port

PAGE = Path(__file__).parents[2] / "docs" / "fault-tolerance.md"
_TABLE = re.compile(r"(<!-- rounds: begin -->\n).*(<!-- rounds: end -->)", re.DOTALL)
RANK = Path(__file__).with_name("recovery_rank.py")
SIZE = 4
SECONDS = 180.0
STEPS_OF_AN_EPOCH = 23
DELAY = 0.02
"""The longest delay between the end of the drawn step and the kill: a few steps."""
RANKMESH_RUN = "-m rankmesh.run --nproc-per-node 4 --master-port {port}"
TORCHRUN = "-m torch.distributed.run --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port}"


class Kind(NamedTuple):
    """A way to recover.

    Attributes:
        text: a row's title.
        rounds: how many make a full run.
        launcher: arguments of Python before the program.
        program: see recovery_rank.py; its arguments.
        epochs: how many it trains.
        code: the launcher's exit code, if a rank is killed.
        size: of the world that goes on.
        variables: of the environment.
        needs: module that has to be installed.
        hosts: whether the ranks are on two hosts, of which one is lost, and comes back.
        joins: whether the job goes on with one host, and the other joins it, with an attempt of its own.
        exact: whether the parameters are bit for bit those of an undisturbed job. The others' differ in their last
            bits, for they are summed in another order: by fewer ranks, or by gloo, whose order depends on DDP's
            buckets, and those are others in the first step of a process.
        replaced: whether the others go on, and a new process joins them in the place of the one that is killed.
    """

    text: str
    rounds: int
    launcher: str
    program: str
    epochs: int
    code: int = 0
    size: int = SIZE
    variables: Mapping[str, str] = {}
    needs: str = "sklearn"
    hosts: bool = False
    joins: bool = False
    exact: bool = True
    replaced: bool = False

    @property
    def last_epochs(self) -> int:
        """In how many of the last epochs no rank is killed: those in which the host joins again."""
        return 10 if self.joins else 1


_TRAIN = "train_digits --checkpoint digits.npz --epochs 30"
_DDP = "ddp_digits --checkpoint ddp --epochs 10 --backend"
KINDS = {
    "shrink": Kind(
        "shrink",
        50,
        f"{RANKMESH_RUN} --failure-grace 600",
        "train_digits --elastic --patience 0.05 --epochs 30",
        30,
        code=137,
        size=3,
        exact=False,
    ),
    "replace": Kind(
        "replace",
        20,
        f"{RANKMESH_RUN} --max-restarts 1 --replace",
        "train_digits --elastic --epochs 30",
        30,
        exact=False,
        replaced=True,
    ),
    "restart": Kind("restart", 20, f"{RANKMESH_RUN} --max-restarts 1", _TRAIN, 30),
    "hosts": Kind(
        "restart, a host lost and back",
        20,
        "rankmesh run --nnodes 2 --node-rank {node} --nproc-per-node 2 --master-addr host1 --max-restarts 2",
        _TRAIN,
        30,
        hosts=True,
    ),
    "elastic": Kind(
        "restart without the lost host, which joins again",
        20,
        "rankmesh run --nnodes 1:2 --nproc-per-node 2 --master-addr host1 --max-restarts 1",
        _TRAIN,
        30,
        size=2,
        variables={"RECOVERY_STEP_SECONDS": "0.05"},
        hosts=True,
        joins=True,
        exact=False,
    ),
    "ddp": Kind("restart, DDP", 20, f"{RANKMESH_RUN} --max-restarts 1", f"{_DDP} rankmesh", 10, needs="torch"),
    "ddp at once": Kind(
        "the same, --failure-grace 0",
        20,
        f"{RANKMESH_RUN} --max-restarts 1 --failure-grace 0",
        f"{_DDP} rankmesh",
        10,
        needs="torch",
    ),
    # gloo of torch 2.13 finds the addresses of dead ranks in the store, unless each attempt has one of its own.
    "torchrun": Kind(
        "the same, torchrun and gloo",
        20,
        f"{TORCHRUN} --max-restarts 1",
        f"{_DDP} gloo",
        10,
        variables={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        needs="torch",
        exact=False,
    ),
}


class Mark(NamedTuple):
    """A line of a rank's record (recovery_rank.py)."""

    at: float
    process: str
    attempt: int
    what: str
    value: str


@dataclass
class Outcome:
    """What became of a round.

    Attributes:
        kind, seed: which one.
        seconds: from the kill to the end of the first step of the recovered job at all its ranks.
        error, started, joined: from the kill until the last survivor had its error, the last rank of the next attempt
            was started, and the last rank was in the world again; None where there is no such moment.
        whole: the same as ``seconds``, of a world that has grown to its size again.
        wrong: what was not as in an undisturbed job.
        left: what was left behind.
    """

    kind: str
    seed: int
    seconds: float | None = None
    error: float | None = None
    started: float | None = None
    joined: float | None = None
    whole: float | None = None
    wrong: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


class Ending(NamedTuple):
    """How a job ended: its exit code, its output, the records of its ranks, and what it left."""

    code: int
    output: str
    marks: list[Mark]
    left: list[str]

    @property
    def accuracy(self) -> list[float]:
        """Per cent of the test set."""
        return [float(found) for found in re.findall(r"test accuracy: ([\d.]+)%", self.output)]

    @property
    def parameters(self) -> set[str]:
        """Digests of the parameters that ranks ended with."""
        printed = re.findall(r"all ranks identical: (\w+)", self.output)
        return {mark.value for mark in self.marks if mark.what == "parameters"} | set(printed)

    def times(self, what: str, attempt: int, after: float) -> dict[str, list[float]]:
        """When something came to pass in an attempt, in each process in which it did after some moment."""
        found: dict[str, list[float]] = {}
        for mark in self.marks:
            if (mark.what, mark.attempt) == (what, attempt) and mark.at > after:
                found.setdefault(mark.process, []).append(mark.at)
        return found


def job(kind: Kind, victim: int, step: int, delay: float) -> Ending:
    """Run a job in which a rank is killed, none if ``victim`` is -1."""
    folder = Path(tempfile.mkdtemp(prefix="rankmesh-recovery-"))
    shm = Path(tempfile.mkdtemp(prefix="rankmesh-recovery-", dir="/dev/shm"))
    marks = folder / "marks"
    marks.mkdir()
    arguments = f"{RANK} {marks} {victim}.0:{step} {delay} {kind.program}"
    try:
        run = _on_hosts if kind.hosts else _on_this_host
        code, output, left = run(kind, arguments, folder, shm, marks, victim)
        left += [f"shared memory {path.name}" for path in shm.iterdir()]
        left += [f"checkpoint {path}" for name in ("digits.npz", "ddp/*") for path in folder.glob(name)]
        return Ending(code, output, read_marks(marks), left)
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(shm)


def _on_this_host(
    kind: Kind, arguments: str, folder: Path, shm: Path, marks: Path, victim: int
) -> tuple[int, str, list[str]]:
    ranks, port = Ranks(folder), free_port()
    command = [*kind.launcher.format(port=port).split(), *arguments.split()]
    try:
        started = ranks.command(*command, name="job", RANKMESH_SHM_DIR=str(shm), **kind.variables)
        ranks.wait([started], SECONDS)
        left = [f"process {pid}" for pid in ranks.left()]
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                left.append(f"port {port}")
        return started.code or 0, started.stdout + started.stderr, left
    finally:
        with contextlib.suppress(AssertionError):
            ranks.end()


def _on_hosts(
    kind: Kind, arguments: str, folder: Path, shm: Path, marks: Path, victim: int
) -> tuple[int, str, list[str]]:
    """Run a launcher on each of two hosts; the ranks of the second die when its rank comes to the step."""
    with network_hosts(2) as made:
        hosts = Hosts(made, folder)

        def start(node: int) -> Any:
            launcher = kind.launcher.format(node=node)
            token = {"RANKMESH_TOKEN": "the secret of both"}
            return hosts.start(f"host{node + 1}", f"{launcher} {arguments}", **token, **kind.variables)

        try:
            started = [start(0), start(1)]
            if victim >= 0:
                wait_until(lambda: any(mark.what == "killed" for mark in read_marks(marks)), "the kill", SECONDS)
                started[1].end()
                if kind.joins:
                    wait_until(lambda: _goes_on(marks), "a step without the host", SECONDS)
                started[1] = start(1)
            codes = [each.wait(SECONDS) for each in started]
            return max(codes), "".join(each.output for each in started), hosts.left()
        finally:
            hosts.end()


def _goes_on(marks: Path) -> bool:
    """Return whether a step has been done in another attempt than that of the kill."""
    found = read_marks(marks)
    killed = next(mark.attempt for mark in found if mark.what == "killed")
    return any(mark.what == "step" and mark.attempt > killed for mark in found)


def read_marks(marks: Path) -> list[Mark]:
    """Return the records of ranks, in the order of time."""
    lines = [[path.name, *line.split()] for path in marks.iterdir() for line in path.read_text().splitlines()]
    return sorted(
        Mark(float(at), process, int(attempt), what, "".join(value)) for process, at, attempt, what, *value in lines
    )


def judge(outcome: Outcome, kind: Kind, ending: Ending, undisturbed: Ending) -> None:
    """Fill in what became of a round."""
    outcome.left += ending.left
    for what, found, wanted in (
        ("exit code", ending.code, kind.code),
        ("number of different parameters", len(ending.parameters), 1),
    ):
        if found != wanted:
            outcome.wrong.append(f"{what}: {found}, not {wanted}")
    if len(ending.accuracy) != 1 or abs(ending.accuracy[0] - undisturbed.accuracy[0]) > (0 if kind.exact else 0.5):
        outcome.wrong.append(f"accuracy: {ending.accuracy}, not {undisturbed.accuracy}")
    if kind.exact and ending.parameters != undisturbed.parameters:
        outcome.wrong.append(f"parameters: {ending.parameters}, not {undisturbed.parameters}")
    if kind.program.startswith("train_digits") and "single process: equal" not in ending.output:
        outcome.wrong.append("the parameters are not those of one process on its own")
    if kind.joins and sum(mark.what == "parameters" for mark in ending.marks) != SIZE:
        outcome.wrong.append("the job did not end with all ranks")
    kills = [mark.at for mark in ending.marks if mark.what == "killed"]
    if len(kills) != 1:
        outcome.wrong.append(f"{len(kills)} ranks were killed")
        return
    (killed,) = kills
    survivors = {mark.process for mark in ending.marks if mark.at < killed}
    errors = [max(found) for found in ending.times("failed", 0, killed).values()]
    outcome.error = max(errors) - killed if errors else None
    for attempt in sorted({mark.attempt for mark in ending.marks}):
        joined, steps = ending.times("joined", attempt, killed), ending.times("step", attempt, killed)
        others = survivors & set(joined)
        first = {process: joined[process][0] for process in others or joined}
        last = {process: found[-1] for process, found in joined.items()}
        if len(ends := _first_after(first, steps)) == (SIZE - 1 if others else kind.size):
            outcome.seconds, outcome.joined = max(ends) - killed, max(first.values()) - killed
            starts = [max(found) for found in ending.times("started", attempt, killed).values()]
            outcome.started = max(starts) - killed if starts else None
            if kind.replaced and len(ends := _first_after(last, steps)) == SIZE:
                outcome.whole = max(ends) - killed
            elif kind.replaced:
                outcome.wrong.append("the world did not grow to its size again")
            return
    outcome.wrong.append("no step was made after the kill")


def _first_after(moments: Mapping[str, float], times: Mapping[str, Sequence[float]]) -> list[float]:
    """Return the first of the times of each process that is after a moment of it."""
    found = [[at for at in times.get(process, ()) if at > moment] for process, moment in moments.items()]
    return [later[0] for later in found if later]


def one(name: str, seed: int, undisturbed: Ending) -> Outcome:
    """Run one round."""
    kind, draw = KINDS[name], random.Random(f"{name} {seed}")
    victim = draw.choice((2, 3)) if kind.hosts else draw.randrange(SIZE)
    step = draw.randrange(STEPS_OF_AN_EPOCH, STEPS_OF_AN_EPOCH * (kind.epochs - kind.last_epochs))
    outcome = Outcome(name, seed)
    try:
        ending = job(kind, victim, step, draw.uniform(0, DELAY))
    except AssertionError as error:
        outcome.wrong.append(f"it did not end: {error}")
    else:
        judge(outcome, kind, ending, undisturbed)
        if outcome.wrong:
            outcome.wrong.append(ending.output[-4000:])
    return outcome


def rounds(names: Sequence[str], count: int | None, first: int) -> Iterator[Outcome]:
    """Run the rounds of some kinds in turns, as a machine is not equally fast at all times; before, a job of each."""
    undisturbed = {}
    for name in names:
        undisturbed[name] = found = job(KINDS[name], -1, 0, 0.0)
        if found.code or found.left or len(found.parameters) != 1:
            raise SystemExit(f"{name}, undisturbed: {found.left}\n{found.output}")
        print(f"{name}: undisturbed, accuracy {found.accuracy}, parameters {found.parameters}", flush=True)
    counts = {name: count or KINDS[name].rounds for name in names}
    for number in range(max(counts.values())):
        for name in names:
            if number < counts[name]:
                yield one(name, first + number, undisturbed[name])


HEADINGS = ("", "rounds", "wrong", "left", "error", "started", "joined", "next step", "longest", "whole")


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the lines of the table, in Markdown."""
    lines = [f"| {' | '.join(HEADINGS)} |", "|---" + "|---:" * (len(HEADINGS) - 1) + "|"]
    for name, kind in KINDS.items():
        if found := [outcome for outcome in outcomes if outcome.kind == name]:
            wrong, left = (sum(bool(getattr(outcome, what)) for outcome in found) for what in ("wrong", "left"))
            cells = [kind.text, str(len(found)), str(wrong), str(left)]
            cells += [_seconds(found, what, statistics.median) for what in ("error", "started", "joined", "seconds")]
            cells += [_seconds(found, "seconds", max), _seconds(found, "whole", statistics.median)]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _seconds(outcomes: Sequence[Outcome], what: str, choose: Callable[[list[float]], float]) -> str:
    found = [getattr(outcome, what) for outcome in outcomes if getattr(outcome, what) is not None]
    return f"{choose(found):.2f}" if found else ""


def write_page(paths: Sequence[str]) -> None:
    """Write the table of docs/fault-tolerance.md from results."""
    runs = [json.loads(Path(path).read_text()) for path in paths]
    outcomes = [Outcome(**each) for run in runs for each in run["outcomes"]]
    machine = "; ".join(dict.fromkeys(run["machine"] for run in runs))
    load = ", ".join(run["load"] for run in runs)
    lines = [*table(outcomes), "", f"{runs[-1]['date']}, {machine}; load averages {load}."]
    text = "\n".join(lines)
    PAGE.write_text(_TABLE.sub(lambda found: f"{found[1]}{text}\n{found[2]}", PAGE.read_text()))


def _write(path: Path, outcomes: Sequence[Outcome], loads: Sequence[float]) -> None:
    result = {
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "load": f"{min(loads):.0f} to {max(loads):.0f}",
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }
    path.write_text(json.dumps(result))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print the table, and return 1 if something was wrong or left."""
    parser = argparse.ArgumentParser(prog="python -m tools.faults.recovery", description=__doc__)
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="only this kind; may be repeated")
    parser.add_argument("--rounds", type=int, help="of each kind; by default 50 of shrink, 20 of the others")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--json", help="write the outcomes to this file, after each round")
    parser.add_argument("--page", nargs="+", metavar="FILE", help=f"write the table of {PAGE.name}, run nothing")
    options = parser.parse_args(arguments)
    if options.page:
        write_page(options.page)
        return 0
    names = [name for name in options.kind or KINDS if importlib.util.find_spec(KINDS[name].needs)]
    if why := why_not():
        names = [name for name in names if not KINDS[name].hosts]
        print(f"left out: rounds with hosts: {why}")
    outcomes, began, loads = [], time.monotonic(), []
    for outcome in rounds(names, options.rounds, options.first):
        outcomes.append(outcome)
        loads.append(os.getloadavg()[0])
        state = "ok" if not outcome.wrong + outcome.left else "\n".join(["WRONG", *outcome.wrong, *outcome.left])
        print(f"{outcome.kind} --first {outcome.seed}: {outcome.seconds or -1:.2f} s, {state}", flush=True)
        if options.json:
            _write(Path(options.json), outcomes, loads)
    print(f"\n{len(outcomes)} rounds in {time.monotonic() - began:.0f} s\n")
    print("\n".join(table(outcomes)))
    return int(any(outcome.wrong or outcome.left for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
