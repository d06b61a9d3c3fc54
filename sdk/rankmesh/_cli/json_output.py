"""JSON documents on standard output."""

from __future__ import annotations

import json
from typing import Any

from rankmesh._cli.exit_codes import write as _write


def write(document: Any) -> None:
    """Write one indented document."""
    _write(json.dumps(document, indent=2, ensure_ascii=True, default=vars) + "\n")  # dataclasses become objects
