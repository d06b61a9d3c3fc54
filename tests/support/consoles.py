"""The console blocks of a page: their commands, run one after the other in one shell, and what they print."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_END = "@@ command {} is over @@"
ANYTHING = "…"
"""Stands for any text within a line, and alone in a line for any lines."""


class Step(NamedTuple):
    """A command of a page.

    Attributes:
        line: where in the page it is.
        command: what is typed.
        printed: what the page says that it prints.
    """

    line: int
    command: str
    printed: str


def below(page: str, title: str) -> str:
    """Return the text below a heading, up to the next one of its level or a higher one."""
    found = re.search(rf"^(##+) {re.escape(title)}\n", page, re.MULTILINE)
    assert found is not None, title
    return re.split(rf"^#{{2,{len(found[1])}}} ", page[found.end() :], maxsplit=1, flags=re.MULTILINE)[0]


def steps_of(page: str) -> list[Step]:
    """Return the commands of a page's console blocks: the lines after ``$``, and those after ``>`` that go on."""
    found = []
    for block in _BLOCK.finditer(page):
        first = page.count("\n", 0, block.start(1)) + 1
        for number, line in enumerate(block[1].splitlines(), first):
            if line.startswith("$ "):
                found.append(Step(number, line[2:], ""))
            elif line.startswith("> ") and not found[-1].printed:
                found[-1] = found[-1]._replace(command=f"{found[-1].command}\n{line[2:]}")
            else:
                found[-1] = found[-1]._replace(printed=f"{found[-1].printed}{line}\n")
    return found


def run(steps: list[Step], folder: Path, environment: Mapping[str, str], seconds: float) -> list[str]:
    """Run the commands in one bash; return what each printed, errors included."""
    script = folder / "page.sh"
    parts = [f"{step.command}\nprintf '\\n%s\\n' '{_END.format(number)}'\n" for number, step in enumerate(steps)]
    script.write_text("exec 2>&1\n" + "".join(parts))
    done = subprocess.run(
        ["bash", str(script)],
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    found, rest = [], done.stdout
    for number in range(len(steps)):
        printed, _, rest = rest.partition(f"\n{_END.format(number)}\n")
        found.append(printed)
    return found


def fits(printed: str, reported: str) -> bool:
    """Whether what was printed is what the page says."""
    parts = [re.escape(part) for part in re.split(rf"^{ANYTHING}\n", reported, flags=re.MULTILINE)]
    pattern = "(?:.*\n)*".join(part.replace(ANYTHING, ".*") for part in parts)
    text = printed if not printed or printed.endswith("\n") else f"{printed}\n"
    return re.fullmatch(pattern, text) is not None
