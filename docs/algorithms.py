"""Writes all algorithms, from their table and docstrings, into docs/algorithms.md: ``make docs``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

from rankmesh_agent.collectives import select

PAGE = Path(__file__).with_name("algorithms.md")
BEGIN, END = "<!-- algorithms: begin -->", "<!-- algorithms: end -->"
MEDIA = {
    "segment": "shared memory",
    "reads": "shared memory, and the others' own memory (`process_vm_readv`)",
    "registered": "arrays of `dist.empty()`",
    "link": "TCP, and other messages",
    "hosts": "several hosts",
}


def sections() -> Iterator[str]:
    """Yield the section of each collective: its algorithms by medium, each with its steps and bytes."""
    for kind in dict.fromkeys(kind for kind, _ in select._TABLE):
        yield f"## {kind.name.lower()}\n\n| medium | algorithm | | steps and bytes |\n|---|---|---|---|"
        seen = set()
        for medium, title in MEDIA.items():
            for _, function in select._TABLE.get((kind, medium), ()):
                if function not in seen or medium == "hosts":
                    yield f"| {title} | `{function.__name__}` | {' | '.join(described(function))} |"
                seen.add(function)
        yield ""


def described(function: select.Algorithm) -> tuple[str, str]:
    """Return what an algorithm does, and its steps."""
    paragraphs = [" ".join(each.split()) for each in (inspect.getdoc(function) or "").split("\n\n")]
    steps = [each.removeprefix("Steps: ") for each in paragraphs if each.startswith("Steps: ")]
    text = " ".join(each for each in paragraphs if not each.startswith(("Steps: ", "Raises:", "Args:")))
    return text.replace("``", "`").replace("|", "&#124;"), " ".join(steps).replace("``", "`")


def page(text: str) -> str:
    """Return the page with today's algorithms between its markers."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    written = "\n".join(sections()).rstrip()
    return f"{head}{BEGIN}\n{written}\n{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
