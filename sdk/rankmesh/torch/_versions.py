"""Versions of torch: the oldest that the backend supports, and how that one differs from newer ones."""

from __future__ import annotations

from typing import Any

import torch

OLDEST = (2, 7)


def refuse_older() -> None:
    """Raise an error if this version of torch is too old.

    Raises:
        ImportError: it is; says which version is needed.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise ImportError(
            f"backend 'rankmesh' needs torch {needed} or newer, but this is torch {torch.__version__}: "
            f"pip install 'torch>={needed}'; NumPy arrays need no torch: import rankmesh as dist"
        )


def complete_options(c10d: Any) -> None:
    """Give each call's options ``asyncOp``, which most of them lack in torch 2.7.

    Such calls are queued, and torch waits for the Work of a synchronous one.
    """
    for name in ("AllToAll", "Allreduce", "AllreduceCoalesced", "Barrier", "Gather", "Reduce"):
        kind = getattr(c10d, f"{name}Options")
        if not hasattr(kind, "asyncOp"):
            kind.asyncOp = True
