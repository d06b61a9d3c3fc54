"""The rows of the page's table: printed at the end of the run, and with ``--page`` written into the page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs/torch.md"


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--page", action="store_true", help=f"write what passed into the table of {PAGE.name}")


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    """Print a row for each library whose programs have run."""
    rows = {
        kind: [value for report in terminalreporter.stats.get(kind, []) for _, value in report.user_properties]
        for kind in ("passed", "failed")
    }
    if printed := sorted(rows["passed"] + rows["failed"]):
        terminalreporter.section("digests of the trained weights")
        terminalreporter.write_line("\n".join(printed))
    if config.getoption("page"):
        text = PAGE.read_text()
        for row in rows["passed"]:
            text = re.sub(rf"^{re.escape(row.partition(')')[0])}\).*$", row, text, flags=re.MULTILINE)
        PAGE.write_text(text)
