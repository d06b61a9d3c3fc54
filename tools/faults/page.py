"""``python -m tools.faults.page OURS GLOOS``: the table of docs/failure-model.md, from two results of ``--json``."""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.faults.kinds import KINDS
from tools.faults.run import Outcome

PAGE = Path(__file__).parents[2] / "docs" / "failure-model.md"
_TABLE = re.compile(r"(<!-- table: begin -->\n).*(<!-- table: end -->)", re.DOTALL)
_HEADINGS = ("fault", "runs", "hangs", "wrong", "named", "seconds", "leaks", "went on", "gloo: runs", "hangs", "named")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table."""
    ours, gloos = (
        [Outcome(**each) for each in json.loads(Path(path).read_text())] for path in arguments or sys.argv[1:]
    )
    lines = [f"| {' | '.join(_HEADINGS)} |", "|---" + "|---:" * (len(_HEADINGS) - 1) + "|"]
    for kind, about in KINDS.items():
        lines.append(
            _row(f"{kind}: {about.text}", *([run for run in runs if run.kind == kind] for runs in (ours, gloos)))
        )
    lines.append(_row("all", ours, gloos))
    table = "\n".join(lines)
    PAGE.write_text(_TABLE.sub(lambda found: f"{found[1]}{table}\n{found[2]}", PAGE.read_text()))
    return 0


def _row(name: str, ours: Sequence[Outcome], gloos: Sequence[Outcome]) -> str:
    seconds = [error["seconds"] for run in ours for error in run.errors if error["seconds"] is not None]
    went_on = sum(run.recoveries for run in ours)
    cells = [
        name,
        str(len(ours)),
        str(sum(bool(run.hangs) for run in ours)),
        str(sum(bool(run.wrong) for run in ours)),
        _named(ours),
        f"{statistics.median(seconds):.2f} / {max(seconds):.2f}" if seconds else "",
        str(sum(bool(run.leaks) for run in ours)),
        f"{went_on - sum(len(run.unrecovered) for run in ours)} of {went_on}" if went_on else "",
        *([str(len(gloos)), str(sum(bool(run.hangs) for run in gloos)), _named(gloos)] if gloos else ["", "", ""]),
    ]
    return f"| {' | '.join(cells)} |"


def _named(runs: Sequence[Outcome]) -> str:
    """Return how many of the errors named the culprit, of those that were to come."""
    errors = sum(len(run.errors) + run.missing for run in runs)
    return f"{max(errors - sum(len(run.unnamed) for run in runs), 0)} of {errors}" if errors else ""


if __name__ == "__main__":
    sys.exit(main())
