"""What mpirun starts for a test: one rank, whose output goes to files of its own.

What MPI and the libraries under it say, of the machine for the most part, goes to another file than Python's errors.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(prefix: str, script: str) -> None:
    """Run a script of support.processes as this rank.

    Args:
        prefix: of the paths of the files.
        script: takes rank and size from its command line.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a rank does not outlive an mpirun that is killed
    rank, size = os.environ["OMPI_COMM_WORLD_RANK"], os.environ["OMPI_COMM_WORLD_SIZE"]
    for stream, kind in (sys.stdout, "out"), (sys.stderr, "mpi"):
        descriptor = os.open(f"{prefix}-{rank}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)
    sys.stderr = open(f"{prefix}-{rank}.err", "a", buffering=1)  # noqa: SIM115  # until the end
    vars(sys)["__stderr__"] = sys.stderr
    sys.argv = [script, rank, size]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
