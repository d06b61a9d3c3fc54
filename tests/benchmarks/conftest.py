"""The benchmarks are run from the project's root and not installed, so the tests put the root on the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
