"""Prints which of the names given CuPy and nccl4py have, as JSON: their parameters; null if they are not there.

With no names given: the public names of these, which are then the doubles.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from typing import Any

MODULES = (
    *("cupy", "cupy.cuda", "cupy.cuda.memory", "cupy.cuda.pinned_memory", "cupy.cuda.runtime"),
    "nccl.bindings.nccl",
)
_SPECIAL = (
    "__cuda_array_interface__",
    "__cuda_stream__",
    "__enter__",
    "__exit__",
    "__array__",
    "__call__",
    "__dlpack__",
    "__dlpack_device__",
)


def public() -> list[str]:
    found = []
    for module in MODULES:
        for name, value in vars(importlib.import_module(module)).items():
            if name.startswith("_") or inspect.ismodule(value):
                continue
            if not _ours(value, module) or name == "annotations":
                continue
            found.append(f"{module}:{name}")
            if inspect.isclass(value):
                owned = {name for kind in value.__mro__ if _ours(kind, module) for name in vars(kind)}
                found += [f"{module}:{name}.{m}" for m in owned if not m.startswith("_") or m in _SPECIAL]
    return sorted(found)


def _ours(value: object, module: str) -> bool:
    return getattr(value, "__module__", module).partition(".")[0] == module.partition(".")[0]


def parameters(path: str) -> list[str] | None:
    """Return the names of the parameters of a function or class, ``**`` for any; none for anything else."""
    module, _, names = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in names.split("."):
        if not hasattr(found, name):
            return None
        found = getattr(found, name)
    if not callable(found):
        return []
    try:
        own = [name.replace("kwargs", "**") for name in inspect.signature(found).parameters if name != "self"]
        if own or not inspect.getdoc(found):
            return own
    except (ValueError, TypeError):
        pass
    # Compiled: the docstring begins with the signature, with C's types.
    told = re.search(r"\w\((.*?)\)(?: ->.*)?$", inspect.getdoc(found) or "", re.MULTILINE)
    words = [part.partition("=")[0].split() for part in told[1].split(", ")] if told and told[1] else []
    own = ["**" if part[-1] == "**kwargs" else part[-1].strip("*\\") for part in words]
    return [name for name in own if name not in ("self", "")]


if __name__ == "__main__":
    asked = json.loads(sys.argv[1]) if len(sys.argv) > 1 else public()
    print(json.dumps({path: parameters(path) for path in asked}))
