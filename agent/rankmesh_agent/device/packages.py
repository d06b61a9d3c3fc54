"""Installed packages of CuPy and of NVIDIA's libraries: whether they fit together and the driver, and the remedies."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path

_log = logging.getLogger("rankmesh")
_EXTRAS = {12: "gpu", 13: "gpu-cuda13"}
_CUPY = {"cupy-cuda11x": 11, "cupy-cuda12x": 12, "cupy-cuda13x": 13, "cupy": 0}
"""CUDA versions of CuPy's packages; 0: any, as one that was built from source or is conda's."""
_NCCL = "libnccl.so.2"


@functools.cache
def driver_cuda_version() -> int:
    """Return the newest major version of CUDA that the driver supports, 0 without a driver. Needs no GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    version = ctypes.c_int()
    failed = driver.cuDriverGetVersion(ctypes.byref(version))
    return 0 if failed else version.value // 1000


def install_hint() -> str:
    """Return the command that installs CuPy for this machine's driver."""
    driver = driver_cuda_version()
    if not driver:
        return "pip install 'rankmesh[gpu]' for CUDA 12, 'rankmesh[gpu-cuda13]' for 13 (nvidia-smi prints the version)"
    if driver < min(_EXTRAS):
        return f"CuPy needs a driver for CUDA {min(_EXTRAS)} or later, this one is for CUDA {driver}"
    cuda = min(driver, max(_EXTRAS))
    return f"pip install 'rankmesh[{_EXTRAS[cuda]}]' (CuPy for CUDA {cuda}, as the driver)"


def nccl_hint() -> str:
    """Return the command that installs NCCL and its bindings for the installed CuPy."""
    cuda = max(_installed().values(), default=0) or driver_cuda_version() or min(_EXTRAS)
    return f"pip install nccl4py nvidia-nccl-cu{cuda}"


def conflict() -> str:
    """Return why the installed packages of CuPy cannot be used, and the remedy; '' if nothing is known against them.

    Several overwrite one another's files. One for a newer CUDA than the driver's finds no GPU.
    """
    installed = _installed()
    if len(installed) > 1:
        names = " and ".join(installed)
        return f"{names} are installed, of which only one can be: pip uninstall {' '.join(installed)}; {install_hint()}"
    for name, cuda in installed.items():
        driver = driver_cuda_version()
        if driver and cuda > driver:
            return (
                f"{name} needs a driver for CUDA {cuda}, this one is for CUDA {driver}: update the driver, or "
                f"pip uninstall {name}; {install_hint()}"
            )
    return ""


def _installed() -> dict[str, int]:
    """Return the installed packages of CuPy, with the CUDA versions that they need."""
    found = {}
    for name, cuda in _CUPY.items():
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found[name] = cuda
    return found


def load_nccl() -> bool:
    """Load the NCCL library that torch has brought, and return whether there is one.

    nccl4py then finds it among the libraries that the process has loaded, which have its name.
    """
    for path in _nccl_libraries():
        try:
            ctypes.CDLL(str(path))
        except OSError as error:
            _log.debug("cannot load %s: %s", path, error)
            continue
        return True
    return False


def _nccl_libraries() -> Iterator[Path]:
    """Yield the NCCL libraries of NVIDIA's package, wherever it is on the path, and of torch itself."""
    for module, folder in (("nvidia", "nccl/lib"), ("torch", "lib")):
        spec = importlib.util.find_spec(module)
        for location in (spec and spec.submodule_search_locations) or ():
            path = Path(location, folder, _NCCL)
            if path.exists():
                yield path
