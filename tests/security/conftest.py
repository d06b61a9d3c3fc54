"""The benchmarks, whose hostile clients are here too, are not installed, so the project's root comes on the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
