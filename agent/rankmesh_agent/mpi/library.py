"""mpi4py and the MPI library: their availability and capabilities."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from typing import Any

from rankmesh_agent.config.launchers import started_with_ulfm
from rankmesh_agent.wire.errors import DistBackendError

_INSTALL = "pip install 'rankmesh[mpi]'"
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
    if started_with_ulfm(os.environ):
        # After a death Open MPI 5.0.11 may wait without end in the barrier of MPI_Finalize.
        os.environ["OMPI_MCA_async_mpi_finalize"] = "1"  # noqa: SIM112  # MCA's names are lower case
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


def fault_classes() -> frozenset[int]:
    """Return the classes of errors after the death of a rank where MPI goes on then; none where it ends the job."""
    MPI = mpi()  # noqa: N806  # mpi4py's usual name
    if not started_with_ulfm(os.environ):
        return frozenset()
    return frozenset({MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED})


def _one_line(error: BaseException) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
