"""Run torch's own distributed tests over gloo and over the mesh and write ``docs/torch-suite.md``.

``make test-torch-suite`` runs all, half an hour; with names of plans, those, and takes the others' results from
earlier runs. It exits with 1 if a test passes over gloo and not over the mesh, unless page.KNOWN says why.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from support.torch_suite import FAILED, PASSED, TESTS, Outcome, Plan, page, run

BACKENDS = ("gloo", "rankmesh")
PLANS = (
    Plan("", 2),
    Plan("", 3),
    Plan("", 8),
    Plan("", 3, "mpi"),
    Plan("", 2, gpus_in_host_memory=True),
)
LIMIT = 1800.0
"""Seconds for a plan over one backend."""
RESULTS = TESTS.parent / "out" / "torch-suite"
PAGE = TESTS.parent / "docs" / "torch-suite.md"


def main(chosen: list[str]) -> int:
    """Run the plans of these names, all if there are none, and write the page; return the exit code."""
    unknown = set(chosen) - {str(plan) for plan in PLANS}
    if unknown:
        print(f"no such plan: {', '.join(sorted(unknown))}; there are {', '.join(map(str, PLANS))}", file=sys.stderr)
        return 2
    RESULTS.mkdir(parents=True, exist_ok=True)
    for plan in PLANS:
        if not chosen or str(plan) in chosen:
            for backend in BACKENDS:
                carry_out(plan._replace(backend=backend))
    found = {plan: tuple(results(plan._replace(backend=backend)) for backend in BACKENDS) for plan in PLANS}
    PAGE.write_text(page.text({plan: both for plan, both in found.items() if all(both)}))
    print(f"written: {PAGE}")
    return 1 if any(set(page.worse(*both)) - page.KNOWN.keys() for both in found.values()) else 0


def carry_out(plan: Plan) -> None:
    """Run a plan's tests, say what does not pass, and keep the outcomes."""
    outcomes = []
    for outcome in run(plan, LIMIT):
        outcomes.append(outcome)
        if outcome.outcome == FAILED:
            print(f"{plan.backend}, {plan}: {outcome.test} failed: {page.error_of(outcome)}", flush=True)
    passed = [outcome for outcome in outcomes if outcome.outcome == PASSED]
    seconds = sum(outcome.seconds for outcome in outcomes)
    print(f"{plan.backend}, {plan}: {len(passed)} of {len(outcomes)} passed in {seconds:.0f} s", flush=True)
    kept(plan).write_text(json.dumps(outcomes))


def results(plan: Plan) -> list[Outcome]:
    """Return the outcomes that were kept, none if the plan was never carried out."""
    path = kept(plan)
    return [Outcome(*each) for each in json.loads(path.read_text())] if path.exists() else []


def kept(plan: Plan) -> Path:
    return RESULTS / f"{plan.backend}-{plan}.json"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
