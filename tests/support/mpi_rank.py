"""What mpirun starts for a test: one rank, whose output goes to files of its own."""

from __future__ import annotations

import os
import runpy
import sys


def main(prefix: str, script: str) -> None:
    """Run a script of support.processes as this rank.

    Args:
        prefix: of the paths of the files.
        script: takes rank and size from its command line.
    """
    rank, size = os.environ["OMPI_COMM_WORLD_RANK"], os.environ["OMPI_COMM_WORLD_SIZE"]
    for stream, kind in (sys.stdout, "out"), (sys.stderr, "err"):
        descriptor = os.open(f"{prefix}-{rank}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)
    sys.argv = [script, rank, size]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
