"""Run torch's own distributed tests over gloo and over the mesh and write ``docs/torch-suite.md``.

``make test-torch-suite`` runs all, half an hour; with names of plans, those, and takes the others' results, and those
with other versions of torch, from earlier runs. It exits with 1 if a test passes over gloo and not over the mesh,
unless page.KNOWN says why.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

from tools.torch_suite import FAILED, PASSED, ROOT, Outcome, Plan, page, run

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
RESULTS = ROOT / "out" / "torch-suite"
PAGE = ROOT / "docs" / "torch-suite.md"


def main(chosen: list[str]) -> int:
    """Run the plans of these names, all if there are none, and write the page; return the exit code."""
    unknown = set(chosen) - {str(plan) for plan in PLANS}
    if unknown:
        print(f"no such plan: {', '.join(sorted(unknown))}; there are {', '.join(map(str, PLANS))}", file=sys.stderr)
        return 2
    here = RESULTS / version("torch").partition("+")[0]
    here.mkdir(parents=True, exist_ok=True)
    for plan in PLANS:
        if not chosen or str(plan) in chosen:
            for backend in BACKENDS:
                carry_out(plan._replace(backend=backend), here)
    by_age = sorted(RESULTS.iterdir(), key=lambda folder: [int(part) for part in folder.name.split(".")])
    found = {folder.name: results(folder) for folder in by_age}
    PAGE.write_text(page.text(found))
    print(f"written: {PAGE}")
    return 1 if any(set(page.worse(*both)) - page.KNOWN.keys() for both in found[here.name].outcomes.values()) else 0


def carry_out(plan: Plan, folder: Path) -> None:
    """Run a plan's tests, say what does not pass, and keep the outcomes."""
    outcomes = []
    for outcome in run(plan, LIMIT):
        outcomes.append(outcome)
        if outcome.outcome == FAILED:
            print(f"{plan.backend}, {plan}: {outcome.test} failed: {page.error_of(outcome)}", flush=True)
    passed = [outcome for outcome in outcomes if outcome.outcome == PASSED]
    seconds = sum(outcome.seconds for outcome in outcomes)
    print(f"{plan.backend}, {plan}: {len(passed)} of {len(outcomes)} passed in {seconds:.0f} s", flush=True)
    kept(plan, folder).write_text(json.dumps(outcomes))


def results(folder: Path) -> page.Results:
    """Return what was kept of a version: the plans that were carried out over both backends, and the reports."""
    both = {plan: tuple(kept(plan._replace(backend=backend), folder) for backend in BACKENDS) for plan in PLANS}
    outcomes = {
        plan: tuple([Outcome(*each) for each in json.loads(path.read_text())] for path in paths)
        for plan, paths in both.items()
        if all(path.exists() for path in paths)
    }
    return page.Results(outcomes, {path.stem: path.read_text() for path in folder.glob("*.xml")})


def kept(plan: Plan, folder: Path) -> Path:
    return folder / f"{plan.backend}-{plan}.json"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
