"""Draws the imports between the packages' parts into docs/architecture.md: ``make docs``.

An arrow that other arrows imply is left out (transitive reduction), so that the layers show.
"""

from __future__ import annotations

import sys
from pathlib import Path

import grimp

PAGE = Path(__file__).with_name("architecture.md")
PACKAGES = {"rankmesh": "SDK", "rankmesh_gateway": "gateway", "rankmesh_agent": "agent"}
BEGIN, END = "<!-- imports: begin -->", "<!-- imports: end -->"


def parts(graph: grimp.ImportGraph) -> dict[str, set[str]]:
    """Return each part's imports; parts are the modules and packages directly under the three packages."""
    found: dict[str, set[str]] = {}
    children = sorted(child for package in PACKAGES for child in graph.find_children(package))
    for part in children:
        found.setdefault(part, set())
        for module in {part, *graph.find_descendants(part)}:
            for imported in graph.find_modules_directly_imported_by(module):
                other = ".".join(imported.split(".")[:2])
                if other != part and other in children:
                    found[part].add(other)
    return found


def reduce(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the edges that no longer path implies; ``edges`` has no circle."""

    def reachable(part: str) -> set[str]:
        return edges[part].union(*(reachable(other) for other in edges[part]))

    return {part: others - set().union(*(reachable(other) for other in others)) for part, others in edges.items()}


def mermaid(edges: dict[str, set[str]]) -> str:
    """Return a Mermaid flow chart of the parts in their packages."""
    lines = ["```mermaid", "flowchart TD"]
    for package, title in PACKAGES.items():
        lines.append(f"  subgraph {package}[{title}]")
        inside = [part for part in edges if part.startswith(f"{package}.")]
        lines += [f'    {part}["{part.removeprefix(f"{package}.")}"]' for part in inside]
        lines.append("  end")
    lines += [f"  {part} --> {other}" for part, others in edges.items() for other in sorted(others)]
    return "\n".join([*lines, "```"])


def page(text: str) -> str:
    """Return the page with the chart of today's imports between its markers."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True)
    return f"{head}{BEGIN}\n{mermaid(reduce(parts(graph)))}\n{END}{tail}"


def main() -> int:
    """Write the page and return the exit code."""
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
