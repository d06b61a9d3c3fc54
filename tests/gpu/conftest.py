"""Which GPUs the tests have: the machine's, where CuPy finds one, and else the double of CuPy (support/cuda_double)."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterable

import pytest
from support.gpus import on_gpus

from rankmesh_agent.gpu.selection import SHARING_VERSION

Variables = Callable[[int], dict[str, str]]


@functools.cache
def why_no_gpu() -> tuple[int, str]:
    """Return how many GPUs there are, and why there are none."""
    if importlib.util.find_spec("cupy") is None:
        return 0, "CuPy is not installed"
    code = "import cupy; print(cupy.cuda.runtime.getDeviceCount())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        return 0, done.stderr.strip().splitlines()[-1]
    return int(done.stdout), "CUDA finds none"


@functools.cache
def nccl_version() -> int:
    """Return the version of the NCCL that ranks get, 0 if they get none."""
    code = "from rankmesh_agent.device import runtime; print(runtime.nccl().get_version())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    return int(done.stdout or 0)


class Machine:
    """What ranks run on.

    Attributes:
        name: ``gpu`` or ``double``.
        thorough: whether all cases are to be tried: on GPUs, or with RANKMESH_TEST_GPU=all.
    """

    def __init__(self) -> None:
        self.gpus, self._why = why_no_gpu()
        self.name = "gpu" if self.gpus else "double"
        self.thorough = bool(self.gpus) or os.environ.get("RANKMESH_TEST_GPU") == "all"

    def own(self, size: int, **options: object) -> Variables:
        """Return the ranks' variables where each has a GPU of its own."""
        if not self.gpus:
            return on_gpus(range(size), **options)  # type: ignore[arg-type]
        if self.gpus < size:
            pytest.skip(f"{size} ranks with a GPU of their own each; this machine has {self.gpus}")
        return lambda rank: {"CUDA_VISIBLE_DEVICES": str(rank)}

    def shared(self, size: int, **options: object) -> Variables:
        """Return the ranks' variables where all share a GPU."""
        return (lambda rank: {"CUDA_VISIBLE_DEVICES": "0"}) if self.gpus else on_gpus([0] * size, **options)  # type: ignore[arg-type]

    def together(self, size: int, **options: object) -> Variables:
        """Return the ranks' variables where all share a GPU, which NCCL is told to take."""
        if self.gpus and nccl_version() < SHARING_VERSION:
            pytest.skip(f"ranks that share a GPU need NCCL {SHARING_VERSION}; this machine has {nccl_version()}")
        shared = self.shared(size, **options)
        return lambda rank: {**shared(rank), "NCCL_MULTI_RANK_GPU_ENABLE": "1"}

    def double(self, gpus: Iterable[int], **options: object) -> Variables:
        """Return the ranks' variables for GPUs that only the double can have: see on_gpus."""
        if self.gpus:
            pytest.skip("a case that only the double of CuPy can bring about")
        return on_gpus(list(gpus), **options)  # type: ignore[arg-type]

    def engine(self, name: str, size: int, **options: object) -> tuple[Variables, str | None]:
        """Return the ranks' variables, and the backend to ask for, with which an engine carries out the calls."""
        if name == "nccl" and not 0 < self.gpus < size:
            return self.own(size, **options), "nccl"
        if name in ("nccl", "nccl, one gpu"):
            return self.together(size, **options), "nccl"
        return self.shared(size, **options), "gloo"

    def real(self) -> None:
        """Skip where there is no GPU."""
        if not self.gpus:
            pytest.skip(f"no GPU of NVIDIA's here: {self._why}")


@pytest.fixture(scope="session")
def machine() -> Machine:
    return Machine()
