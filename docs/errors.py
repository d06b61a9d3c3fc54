"""Draws the tree of errors, from their classes, into docs/errors.md: ``make docs``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from rankmesh_agent.wire import errors

PAGE = Path(__file__).with_name("errors.md")
BEGIN, END = "<!-- errors: begin -->", "<!-- errors: end -->"


def rows(kind: type[errors.DistError], depth: int = 0) -> Iterator[str]:
    """Yield the rows of a class and of those derived from it."""
    meaning = (kind.__doc__ or "").partition("\n")[0].rstrip(".").replace("``", "`")
    also = [base.__name__ for base in kind.__bases__ if not issubclass(base, errors.DistError)]
    note = f" (also a `{'`, `'.join(also)}`)" if depth and also else ""
    yield f"| {'&emsp;' * depth}`{kind.__name__}` | {meaning}{note} | `{kind.code}` | {kind.status} |"
    for child in vars(errors).values():
        if isinstance(child, type) and child.__bases__[0] is kind:
            yield from rows(child, depth + 1)


def page(text: str) -> str:
    """Return the page with the tree of today's errors between its markers."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    table = "\n".join(["| class | meaning | code | HTTP status |", "|---|---|---|---|", *rows(errors.DistError)])
    return f"{head}{BEGIN}\n{table}\n{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
