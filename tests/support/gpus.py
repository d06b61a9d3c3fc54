"""Ranks on GPUs that are none: what tells their processes to load the double of CuPy, and which GPUs they have."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.once import Reports, once
from support.processes import Ranks

TESTS = Path(__file__).resolve().parents[1]
DOUBLE = TESTS / "support" / "cuda_double"
OfEngine = Callable[[Any, str], Reports]
"""Given the machine and an engine: what the ranks of a world of two reported."""


def on_gpus(
    gpus: Sequence[int | Sequence[int]],
    *,
    without: Iterable[str] = (),
    memory: int | None = None,
    delay: float | None = None,
) -> Callable[[int], dict[str, str]]:
    """Return the variables of each rank, for Ranks.start's ``env``.

    Args:
        gpus: by rank, its GPU, or its GPUs in the order of their device numbers; ranks with the same number share one.
        without: what is missing: ``nccl``.
        memory: bytes that a rank can have of a GPU.
        delay: the longest pause of a stream before some of its work, in seconds.
    """
    fixed = {"PYTHONPATH": f"{DOUBLE}{os.pathsep}{TESTS}", "CUDA_DOUBLE_WITHOUT": ",".join(without)}
    if memory is not None:
        fixed["CUDA_DOUBLE_MEMORY"] = str(memory)
    if delay is not None:
        fixed["CUDA_DOUBLE_DELAY"] = str(delay)

    def variables(rank: int) -> dict[str, str]:
        own = gpus[rank]
        names = ",".join(f"gpu-{number}" for number in ([own] if isinstance(own, int) else own))
        return {**fixed, "CUDA_DOUBLE_GPUS": names, "CUDA_DOUBLE_SEED": str(rank)}

    return variables


def each_engine_once(paths: pytest.TempPathFactory, body: Callable[..., Any]) -> OfEngine:
    """Return a function that gives what two ranks over an engine report when they run a body, once for each engine.

    Args:
        paths: where the runs get their folders.
        body: what the ranks run.
    """

    def start(ranks: Ranks, machine: Any, engine: str) -> Reports:
        environment, backend = machine.engine(engine, 2)
        return [rank.reported for rank in ranks.run(body, 2, env=environment, backend=backend)]

    return once(paths, start)
