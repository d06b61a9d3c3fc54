"""The reference of the public API: the topics of ``help(rankmesh)``, and the docstrings of their names."""

from __future__ import annotations

import inspect
import re

import rankmesh

_TOPIC = re.compile(r"^\* ([^:\n]+): (.*(?:\n  .*)*)", re.MULTILINE)
CLASSES = {
    "Groups and results": "ProcessGroup Work Batch P2POp",
    "Reductions and backends": "ReduceOp Backend",
    "Stores": "Store",
    "Functional collectives": "functional.all_reduce functional.broadcast functional.all_gather_single "
    "functional.reduce_scatter_single functional.all_to_all_single",
    "Training": "nn.GradientBucketer utils.data.distributed.DistributedSampler multiprocessing.spawn",
}
"""Classes and submodules' functions, which the topics of the docstring do not list as functions."""


def topics() -> dict[str, list[str]]:
    """Return the names under each topic of the package's docstring."""
    text = inspect.getdoc(rankmesh) or ""
    _, _, functions = text.partition("Functions, with")
    found = {}
    for title, names in _TOPIC.findall(functions):
        words = re.findall(r"\b[A-Za-z_]\w*\b", names.partition(";")[0])
        found[title] = [word for word in words if hasattr(rankmesh, word)]
    return found


def sections() -> str:
    """Return the sections; mkdocstrings fills in the docstrings."""
    parts = ["\n\n## Reference\n\nWritten from the docstrings of `import rankmesh as dist`."]
    for title, names in [*topics().items(), *((title, names.split()) for title, names in CLASSES.items())]:
        parts.append(f"### {title}")
        parts += [f"::: rankmesh.{name}" for name in dict.fromkeys(names)]
    return "\n\n".join(parts)
