"""The table of the digests, at the end of the run."""

from __future__ import annotations

from typing import Any

HEAD = ("library", "version", "gloo", "rankmesh", "RANKMESH_AS=gloo", "equal")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print a row for each section of the page whose programs have run, in the page's order."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    rows = sorted(value for report in reports for name, value in report.user_properties if name == "row")
    if not rows:
        return
    table = [HEAD, *(cells for _, *cells in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(HEAD))]
    terminalreporter.section("digests of the trained weights")
    for row in table:
        terminalreporter.write_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
