"""Runs with random programs and faults, drawn from seeds; ``make test-faults``."""

import os
from pathlib import Path

PATHS = os.pathsep.join(str(Path(__file__).parents[2] / name) for name in ("tests", ""))
"""PYTHONPATH of the ranks."""
