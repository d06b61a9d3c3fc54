"""Generator of docs/torch-suite.md, the results of torch's own tests."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from importlib.metadata import version

from support.torch_suite import FAILED, PASSED, SKIPPED, Outcome, Plan

KNOWN = {
    "test_ddp_profiling_torch_profiler": "it expects an event that ends in another thread than it began in, as gloo's "
    "do; the mesh's `rankmesh:all_reduce` is the call that starts the operation",
}
"""Tests that pass over gloo but not over the mesh, with reasons."""

Both = tuple[list[Outcome], list[Outcome]]
"""Outcomes over gloo and over the mesh."""

HEAD = """\
# PyTorch's own distributed tests over the mesh

Written by `make test-torch-suite`, with torch {torch}. torch's wheel contains the tests of its process groups and of
DistributedDataParallel, `torch.testing._internal.distributed.distributed_test`. They run over gloo and over `rankmesh`,
on one machine, each test in ranks of its own; `make test-torch` runs a part of them over the mesh.

The file selects its tests by the backend's name, and knows torch's own backends only. So it gets one of those names,
and groups are created with the tested backend:

* as for gloo;
* as for MPI: torch has tests of `all_to_all` for MPI alone, and with less than eight ranks the tests of groups;
* with GPUs in host memory: most tests of DistributedDataParallel need GPUs only for their tensors. They get tensors in
  host memory. Tests that need CUDA itself then fail, over gloo as well.

`monitored_barrier` is `rankmesh.torch`'s, because torch's function accepts gloo alone.
[harness.py](../tests/support/torch_suite/harness.py) and
[host_memory.py](../tests/support/torch_suite/host_memory.py) have the other adaptations. The tests check names of
events in profiles only for torch's own backends, so for gloo and not for the mesh.
"""

KINDS = {
    r"issues/|pull/|flak": "switched off by PyTorch, whatever the backend",
    r"CUDA device|CUDA is not|GPU|(?i:nccl\b(?! & Gloo))|accelerator|on CUDA": "requires GPUs, or NCCL",
    r"world ?size": "requires another number of ranks",
    r"MPI|Gloo|GLOO|gloo|requires backend|mpi": "is for another of torch's own backends",
    r"torchvision": "requires torchvision, which is not installed",
}
"""Reasons for skipped tests, by patterns of torch's messages."""


def text(found: Mapping[Plan, Both]) -> str:
    """Return the page."""
    sections = [HEAD.format(torch=version("torch").partition("+")[0]), *numbers(found)]
    return "\n".join([*sections, *failures(found), *skipped(found)])


def numbers(found: Mapping[Plan, Both]) -> Iterable[str]:
    yield "| tests | ranks | gloo: passed | failed | rankmesh: passed | failed | skipped |"
    yield "|---|---|---|---|---|---|---|"
    for plan, both in found.items():
        gloo, ours = (Counter(outcome.outcome for outcome in outcomes) for outcomes in both)
        cells = [gloo[PASSED], gloo[FAILED], ours[PASSED], ours[FAILED], ours[SKIPPED]]
        yield f"| {named(plan)} | {plan.size} | {' | '.join(map(str, cells))} |"
    yield ""


def failures(found: Mapping[Plan, Both]) -> Iterable[str]:
    tests = defaultdict(list)
    for plan, both in found.items():
        lost = {outcome.test: outcome for outcome in both[1] if outcome.outcome == FAILED}
        for outcome in both[0]:
            if outcome.outcome == FAILED:
                over = "both" if outcome.test in lost else "gloo"
                tests[over, error_of(outcome)].append((plan, outcome.test))
        for name in worse(*both):
            error = error_of(lost[name]) if name in lost else "it is skipped"
            tests["rankmesh", f"{error}: {KNOWN[name]}" if name in KNOWN else error].append((plan, name))
    yield "## What fails\n"
    if not any(over == "rankmesh" for over, _ in tests):
        yield "Nothing fails over the mesh that passes over gloo.\n"
    yield "| over | why | tests |"
    yield "|---|---|---|"
    for (over, error), cases in sorted(tests.items(), reverse=True):
        names = ", ".join(f"{name.removeprefix('test_')}" for name in sorted({name for _, name in cases}))
        where = "; ".join(sorted({f"{plan.size} ranks, {named(plan)}" for plan, _ in cases}))
        yield f"| {over} | {escaped(error)} | {names} ({where}) |"
    yield ""


def skipped(found: Mapping[Plan, Both]) -> Iterable[str]:
    yield "## What is skipped\n"
    yield "torch's tests decide that themselves. Over gloo and over the mesh the same ones are skipped.\n"
    yield f"| | {' | '.join(f'{plan.size} ranks, {named(plan)}' for plan in found)} |"
    yield "|---|" + "---|" * len(found)
    counts = {
        plan: Counter(kind(outcome) for outcome in ours if outcome.outcome == SKIPPED)
        for plan, (_, ours) in found.items()
    }
    for reason in [*KINDS.values(), OTHER]:
        row = [counts[plan][reason] for plan in found]
        if any(row):
            yield f"| {reason} | {' | '.join(map(str, row))} |"
    yield ""


OTHER = "other reasons"


def kind(outcome: Outcome) -> str:
    return next((words for pattern, words in KINDS.items() if re.search(pattern, outcome.reason)), OTHER)


def named(plan: Plan) -> str:
    """Return how the tests are chosen, in words."""
    if plan.gpus_in_host_memory:
        return "with GPUs in host memory"
    return f"as for {'MPI' if plan.like == 'mpi' else plan.like}"


def worse(gloo: list[Outcome], ours: list[Outcome]) -> list[str]:
    """Return the tests that pass over gloo and not over the mesh."""
    passed = {outcome.test for outcome in ours if outcome.outcome == PASSED}
    return [outcome.test for outcome in gloo if outcome.outcome == PASSED and outcome.test not in passed]


def error_of(outcome: Outcome) -> str:
    """Return the line that says what went wrong, without what differs from run to run."""
    lines = [line.strip() for line in outcome.reason.splitlines()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    found = (errors or lines or ["?"])[-1]
    found = re.sub(r"Process \d+ terminated or timed out after .*", "it did not end in time", found)
    return re.sub(r" at index \d+ \(expected .*\)$", "", found)


def escaped(words: str) -> str:
    return words[:400].replace("|", "/")
