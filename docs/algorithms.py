"""Writes all algorithms, from their table and docstrings, into docs/algorithms.md: ``make docs``."""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
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
NOTES = defaultdict(
    str,
    slot=", at most a slot",
    lane=", at most a slot from all ranks together",
    shares_cores=", if ranks share cores",
)
UNITS = {1 << 20: "MiB", 1 << 10: "KiB", 1: "bytes"}
SHOWN = 6
"""Limits of a row in the page; those of more ranks continue them."""


def sections() -> Iterator[str]:
    """Yield the section of each collective: the rows of its table by medium, then the steps and bytes of each."""
    for kind in dict.fromkeys(kind for kind, _ in select.TABLE):
        yield f"## {kind.name.lower()}\n\n| medium | algorithm | most bytes |\n|---|---|---|"
        functions = {}
        for medium, title in MEDIA.items():
            for row in select.TABLE.get((kind, medium), ()):
                functions[row.algorithm] = f"`{select.name_of(row.algorithm)}`"
                yield f"| {title} | {functions[row.algorithm]} | {limits(row)} |"
        yield "\n| algorithm | | steps and bytes |\n|---|---|---|"
        for function, name in functions.items():
            yield f"| {name} | {' | '.join(described(function))} |"
        yield ""


def limits(row: select.Row) -> str:
    """Return the most bytes with which a row is taken, by numbers of ranks."""
    begins, parts = sorted(row.limits), []
    for begin, end in zip(begins, [*begins[1:], 0], strict=True):
        ranks = f"{begin} to {end - 1} ranks" if end > begin + 1 else f"{begin} ranks" if end else f"from {begin} ranks"
        most = min(row.limits[begin], row.most(begin, None))
        if most != select.NEVER:
            parts.append(size(most) if len(begins) == 1 else f"{ranks}: {size(most)}")
    return "; ".join([*parts[:SHOWN], "and so on"] if len(parts) > SHOWN else parts) + NOTES[row.able] + NOTES[row.only]


def size(nbytes: float) -> str:
    """Return a number of bytes as text."""
    if nbytes == select.ANY:
        return "any"
    unit = next(unit for unit in UNITS if not nbytes % unit)
    return f"{int(nbytes) // unit} {UNITS[unit]}"


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
