"""Training steps with torch's DistributedDataParallel over RankMesh and over gloo, in turns."""

from __future__ import annotations

from contextlib import ExitStack
from statistics import median
from typing import NamedTuple

from benchmarks.busy import BusyProcesses
from benchmarks.cases import Case, Cell
from benchmarks.implementations import TORCHRUN, Implementation
from benchmarks.results import Results
from benchmarks.rounds import progress, rotated
from benchmarks.workers import WorkerGroup


class Training(NamedTuple):
    """A job of ddp_worker.JOBS: items of a rank in a step; steps in a timing, and how often; where it is measured."""

    title: str
    items: str
    steps: int = 1
    repetitions: int = 5
    ranks: tuple[int, ...] = (2, 4)
    busy: tuple[int, ...] = (0,)


TRAININGS = {
    "mlp": Training("MLP, 10 M parameters", "32 images", busy=(0, 4)),
    "mlp_in_buckets": Training("MLP, gradients in the buckets", "32 images"),
    "net": Training("the tutorial's Net, 22 k parameters", "64 images", steps=5, busy=(0, 4)),
    "gpt": Training("GPT-2 small, 124 M parameters", "64 tokens", repetitions=2, ranks=(2,)),
}
PARTS = ("step", "alone", "communication", "all_reduce")
OURS, GLOO = "rankmesh-ddp", "gloo-ddp"
IMPLEMENTATIONS = tuple(
    Implementation(name, f"DDP over {backend}", backend, "torch", TORCHRUN, program="benchmarks.ddp_worker")
    for name, backend in ((OURS, "rankmesh"), (GLOO, "gloo"))
)


def case(model: str, part: str, ranks: int, busy: int = 0) -> Case:
    """Return the case of a part of a model's step."""
    return Case(f"ddp_{model}_{part}", ranks, busy=busy)


def cases(part: str) -> list[Case]:
    """Return the cases of a part of all models' steps."""
    return [
        case(model, part, ranks, busy)
        for model, training in TRAININGS.items()
        for ranks in training.ranks
        for busy in training.busy
    ]


def measure(implementations: list[Implementation], rounds: int, results: Results) -> None:
    """Measure steps of all models: whole, without communication, the difference, and an all_reduce of the buckets."""
    for ranks in sorted({ranks for training in TRAININGS.values() for ranks in training.ranks}):
        progress(f"{ranks} ranks: starting {', '.join(one.title for one in implementations)}")
        with ExitStack() as stack:
            groups = [stack.enter_context(WorkerGroup(one, ranks)) for one in implementations]
            results.versions.update({group.implementation.name: group.version for group in groups})
            busy = stack.enter_context(BusyProcesses())
            for number in range(rounds):
                for model, training in TRAININGS.items():
                    for others in training.busy if ranks in training.ranks else ():
                        busy.run(others)
                        for group in rotated(groups, number):
                            _turn(group, model, others, results)


def _turn(group: WorkerGroup, model: str, busy: int, results: Results) -> None:
    training = TRAININGS[model]
    by_rank = group.ask(model, 0, training.steps, training.repetitions)
    slowest = [[1e6 * max(each) for each in zip(*ranks, strict=True)] for ranks in zip(*by_rank, strict=True)]
    step, alone, all_reduce = (list(part) for part in zip(*slowest, strict=True))
    # A step may be faster than one without communication by chance, where there is little to communicate.
    communication = [max(1.0, median(step) - median(alone))]
    for part, timings in zip(PARTS, (step, alone, communication, all_reduce), strict=True):
        cell = Cell(case(model, part, group.ranks, busy), group.implementation.name)
        results.add(cell, timings, training.steps)
