"""Code blocks of the README and of docs/: run here, by another test, or marked with the reason why not."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from support.consoles import Step, below, fits, run, steps_of
from support.processes import Ranks, complaints_in, free_port

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN = {
    "README.md": "",
    "docker.md": "Without Docker",
    "errors.md": "",
    "mpi.md": "From mpi4py",
    "observing.md": "With curl",
    "python-api.md": "",
    "quickstart.md": "",
    "security.md": "",
    "stuck-job.md": "",
    "training-loop.md": "",
}
"""Pages whose scripts and commands are run here, and the section of each; without one, all of the page."""
PORTS = ("29500", "8700", "8701", "8702")
"""Ports on these pages, in whose place free ones are taken."""
CODE = {"bash", "console", "python", "sh"}
SECONDS = 360.0
_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>(?:(?!-->).)*) -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)


def blocks(page: Path) -> list[re.Match[str]]:
    return [block for block in _BLOCK.finditer(page.read_text()) if block["kind"] in CODE]


def page_mark(page: Path) -> str:
    """Return the comment in a page's first line."""
    found = re.match(r"<!-- (.*?) -->\n", page.read_text())
    return found[1] if found else ""


def is_valid(mark: str) -> bool:
    """Whether a mark gives a reason, or names files that run the block."""
    if mark.startswith("run by "):
        return all((ROOT / name).is_file() for name in mark.removeprefix("run by ").split(", "))
    return bool(re.fullmatch(r"not run: \w.{8,}", mark, re.DOTALL))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_run_or_says_why_not(page: Path) -> None:
    marks = [block["mark"] or page_mark(page) for block in blocks(page)]
    wrong = [mark for mark in marks if not (is_valid(mark) or (not mark and page.name in RUN))]
    assert not wrong, wrong


def in_order(printed: str) -> str:
    """Put the lines of ranks, which come in any order, behind the launcher's, by rank; each rank's stay in order."""
    lines = printed.splitlines(keepends=True)
    return "".join(sorted(lines, key=lambda line: line[: line.index("]")] if line.startswith("[rank ") else ""))


@pytest.mark.processes
@pytest.mark.parametrize("name", RUN)
def test_the_commands_print_what_the_page_says(ranks: Ranks, name: str) -> None:
    page = ROOT / name if (ROOT / name).is_file() else ROOT / "docs" / name
    if "curl" in page.read_text() and shutil.which("curl") is None:
        pytest.skip("there is no curl on this machine")
    text = page.read_text()
    if RUN[name]:
        before, shown, _ = text.partition(below(text, RUN[name]))
        text = "\n" * before.count("\n") + shown
    for block in blocks(page):
        if block["mark"]:
            text = text.replace(block[0], "\n" * block[0].count("\n"))
    for port in PORTS:
        text = re.sub(rf"(?<=[:= t]){port}\b", str(free_port()), text)
    scripts = re.findall(r"^```python\n(# (\S+\.py)\n.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(scripts) == text.count("```python\n"), "a script's first line is its file's name"
    for script, file in scripts:
        (ranks.folder / file).write_text(script)
    steps = steps_of(text)
    assert steps
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    printed = run(steps, ranks.folder, ranks.environment(PATH=path, PYTHONUNBUFFERED=""), SECONDS)
    wrong = [report(step, found) for step, found in zip(steps, printed, strict=True) if not expected(step, found)]
    assert not wrong, "\n\n".join(wrong)


def expected(step: Step, printed: str) -> bool:
    return fits(in_order(complaints_in(printed)), in_order(step.printed))


def report(step: Step, printed: str) -> str:
    return f"line {step.line}: $ {step.command}\nthe page says:\n{step.printed}\nit printed:\n{printed}"
