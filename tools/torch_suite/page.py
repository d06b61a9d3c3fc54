"""Generator of docs/torch-suite.md, the results with each version of torch."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple
from xml.etree import ElementTree

from tools.torch_suite import FAILED, PASSED, SKIPPED, Outcome, Plan

KNOWN = {
    "test_ddp_profiling_torch_profiler": "it expects an event that ends in another thread than it began in, as gloo's "
    "do; the mesh's `rankmesh:all_reduce` is the call that starts the operation",
}
"""Tests that pass over gloo but not over the mesh, with reasons."""

Both = tuple[list[Outcome], list[Outcome]]
"""Outcomes over gloo and over the mesh."""


class Results(NamedTuple):
    """What is known of a version of torch.

    Attributes:
        outcomes: of torch's own tests.
        reports: pytest's, of our tests, as XML by the names in REPORTS.
    """

    outcomes: Mapping[Plan, Both]
    reports: Mapping[str, str]


REPORTS = {
    "tests": "RankMesh's tests of the backend (`make test-torch`)",
    "integrations": "libraries whose weights are gloo's (`make test-integrations`)",
    "hosts": "tests of torch on two hosts (`make test-hosts`)",
}

HEAD = """\
# Versions of torch, and PyTorch's own distributed tests over the mesh

Written by `make test-torch-versions`, which runs all of this with each version of torch; `make test-torch-suite` runs
PyTorch's own tests alone, with one. RankMesh needs torch 2.7 or newer; its own tests are written for 2.13 and newer.
"""

SUITE = """\

## PyTorch's own tests

torch's wheel contains the tests of its process groups and of DistributedDataParallel,
`torch.testing._internal.distributed.distributed_test`. They run over gloo and over `rankmesh`, on one machine, each
test in ranks of its own; `make test-torch` runs a part of them over the mesh.

The file selects its tests by the backend's name, and knows torch's own backends only. So it gets one of those names,
and groups are created with the tested backend:

* as for gloo;
* as for MPI: torch has tests of `all_to_all` for MPI alone, and with less than eight ranks the tests of groups;
* with GPUs in host memory: most tests of DistributedDataParallel need GPUs only for their tensors. They get tensors in
  host memory. Tests that need CUDA itself then fail, over gloo as well.

`monitored_barrier` is `rankmesh.torch`'s, because torch's function accepts gloo alone.
[harness.py](../tools/torch_suite/harness.py) and
[host_memory.py](../tools/torch_suite/host_memory.py) have the other adaptations. The tests check names of
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


def text(found: Mapping[str, Results]) -> str:
    """Return the page about versions, from the oldest to the newest."""
    sections = [HEAD, *versions(found), SUITE, *numbers(found)]
    return "\n".join([*sections, *failures(found), *skipped(*list(found.items())[-1])])


def versions(found: Mapping[str, Results]) -> Iterable[str]:
    yield f"| torch | {' | '.join(REPORTS.values())} | PyTorch's own tests that pass over gloo: over rankmesh |"
    yield "|---|" + "---|" * (len(REPORTS) + 1)
    for torch, results in found.items():
        cells = [report(results.reports.get(name)) for name in REPORTS]
        over_gloo = sum(outcome.outcome == PASSED for gloo, _ in results.outcomes.values() for outcome in gloo)
        lost = sum(len(worse(*both)) for both in results.outcomes.values())
        yield f"| {torch} | {' | '.join(cells)} | {over_gloo - lost} of {over_gloo} |"


def report(xml: str | None) -> str:
    """Return how many of the tests passed."""
    if xml is None:
        return "not run"
    counts = Counter[str]()
    for suite in ElementTree.fromstring(xml).iter("testsuite"):
        counts.update({name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")})
    run = counts["tests"] - counts["skipped"]
    skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
    return f"{run - counts['failures'] - counts['errors']} of {run}{skipped}"


def numbers(found: Mapping[str, Results]) -> Iterable[str]:
    yield "| torch | tests | ranks | gloo: passed | failed | rankmesh: passed | failed | skipped |"
    yield "|---|---|---|---|---|---|---|---|"
    for torch, results in found.items():
        for plan, both in results.outcomes.items():
            gloo, ours = (Counter(outcome.outcome for outcome in outcomes) for outcomes in both)
            cells = [plan.size, gloo[PASSED], gloo[FAILED], ours[PASSED], ours[FAILED], ours[SKIPPED]]
            yield f"| {torch} | {named(plan)} | {' | '.join(map(str, cells))} |"
    yield ""


def failures(found: Mapping[str, Results]) -> Iterable[str]:
    tests = defaultdict(list)
    cases = [(torch, plan, both) for torch, results in found.items() for plan, both in results.outcomes.items()]
    for torch, plan, both in cases:
        lost = {outcome.test: outcome for outcome in both[1] if outcome.outcome == FAILED}
        for outcome in both[0]:
            if outcome.outcome == FAILED:
                over = "both" if outcome.test in lost else "gloo"
                tests[over, error_of(outcome)].append((torch, plan, outcome.test))
        for name in worse(*both):
            error = error_of(lost[name]) if name in lost else "it is skipped"
            tests["rankmesh", f"{error}: {KNOWN[name]}" if name in KNOWN else error].append((torch, plan, name))
    yield "## What fails\n"
    if not any(over == "rankmesh" for over, _ in tests):
        yield "Nothing fails over the mesh that passes over gloo.\n"
    yield "| over | torch | why | tests |"
    yield "|---|---|---|---|"
    for (over, error), of in sorted(tests.items(), reverse=True):
        with_torch = ", ".join(torch for torch in found if any(torch == each for each, _, _ in of))
        names = ", ".join(f"{name.removeprefix('test_')}" for name in sorted({name for *_, name in of}))
        where = "; ".join(sorted({f"{plan.size} ranks, {named(plan)}" for _, plan, _ in of}))
        yield f"| {over} | {with_torch} | {escaped(error)} | {names} ({where}) |"
    yield ""


def skipped(torch: str, results: Results) -> Iterable[str]:
    yield "## What is skipped\n"
    yield "torch's tests decide that themselves. Over gloo and over the mesh the same ones are skipped; with torch"
    yield f"{torch}:\n"
    yield f"| | {' | '.join(f'{plan.size} ranks, {named(plan)}' for plan in results.outcomes)} |"
    yield "|---|" + "---|" * len(results.outcomes)
    counts = {
        plan: Counter(kind(outcome) for outcome in ours if outcome.outcome == SKIPPED)
        for plan, (_, ours) in results.outcomes.items()
    }
    for reason in [*KINDS.values(), OTHER]:
        row = [counts[plan][reason] for plan in results.outcomes]
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
