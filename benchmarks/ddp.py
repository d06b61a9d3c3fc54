"""Training steps with torch's DistributedDataParallel over RankMesh and over gloo, in turns."""

from __future__ import annotations

from contextlib import ExitStack
from statistics import median

from benchmarks.cases import Case, Cell
from benchmarks.implementations import TORCHRUN, Implementation
from benchmarks.results import Results
from benchmarks.rounds import progress, rotated
from benchmarks.workers import WorkerGroup

STEPS = {"mlp": 1, "mlp_in_buckets": 1, "net": 5}
"""Steps in a timing, by model (see ddp_worker.MODELS)."""
PARTS = ("step", "alone", "communication", "all_reduce")
REPETITIONS = 6
RANKS = (2, 4)
OURS, GLOO = "rankmesh-ddp", "gloo-ddp"
IMPLEMENTATIONS = tuple(
    Implementation(name, f"DDP over {backend}", backend, "torch", TORCHRUN, program="benchmarks.ddp_worker")
    for name, backend in ((OURS, "rankmesh"), (GLOO, "gloo"))
)


def case(model: str, part: str, ranks: int) -> Case:
    """Return the case of a part of a model's step."""
    return Case(f"ddp_{model}_{part}", ranks)


def measure(implementations: list[Implementation], rounds: int, results: Results) -> None:
    """Measure steps of all models: whole, without communication, the difference, and an all_reduce of the buckets."""
    for ranks in RANKS:
        progress(f"{ranks} ranks: starting {', '.join(one.title for one in implementations)}")
        with ExitStack() as stack:
            groups = [stack.enter_context(WorkerGroup(one, ranks)) for one in implementations]
            results.versions.update({group.implementation.name: group.version for group in groups})
            for number in range(rounds):
                for model, steps in STEPS.items():
                    for group in rotated(groups, number):
                        _turn(group, model, steps, results)


def _turn(group: WorkerGroup, model: str, steps: int, results: Results) -> None:
    by_rank = group.ask(model, 0, steps, REPETITIONS)
    slowest = [[1e6 * max(each) for each in zip(*ranks, strict=True)] for ranks in zip(*by_rank, strict=True)]
    step, alone, all_reduce = (list(part) for part in zip(*slowest, strict=True))
    # A step may be faster than one without communication by chance, where there is little to communicate.
    communication = [max(1.0, median(step) - median(alone))]
    for part, timings in zip(PARTS, (step, alone, communication, all_reduce), strict=True):
        results.add(Cell(case(model, part, group.ranks), group.implementation.name), timings, steps)
