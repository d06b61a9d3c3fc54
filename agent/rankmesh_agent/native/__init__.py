"""The compiled core, where it is built and permitted: ``core``, and otherwise the ``reason`` why it is None."""

from __future__ import annotations

import importlib
import os
import zlib
from pathlib import Path
from types import ModuleType

from rankmesh_agent.config.env import permits_native


def _load() -> tuple[ModuleType | None, str]:
    try:
        if not permits_native(os.environ):
            return None, "RANKMESH_NATIVE is 0"
        found = importlib.import_module("rankmesh_agent.native.core")
        sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.p[yx][xi]")))
        if sources and zlib.crc32(sources) != found.SOURCES:
            return None, "its sources have changed since it was built: install the project anew"
        return found, ""
    except ModuleNotFoundError:
        return None, "it was not built at the installation, which takes Linux on x86-64 or aarch64 and a C compiler"
    except (ImportError, ValueError) as error:
        return None, str(error)


core, reason = _load()
