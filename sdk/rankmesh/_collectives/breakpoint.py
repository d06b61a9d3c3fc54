"""breakpoint: the debugger pdb on one rank, while the others wait."""

from __future__ import annotations

import os
import sys
from collections import Counter
from typing import TextIO

from rankmesh._collectives.barrier import barrier
from rankmesh._session.ranks import get_rank
from rankmesh._session.session import require_session

_skipped: Counter[tuple[str, int]] = Counter()
"""Number of calls that ``skip`` has skipped, by file and line."""


def breakpoint(rank: int = 0, skip: int = 0, timeout_s: float | None = 3600) -> None:
    """Start pdb on one rank; the other ranks wait until its user continues. All ranks call it.

    In pdb, ``up`` goes to the caller's frame and ``c`` continues. pdb reads the rank's standard input: ``rankmesh run``
    passes a terminal on to all ranks, and anything else to local rank 0.

    Args:
        rank: the global rank that starts pdb.
        skip: number of calls at the same line that return at once.
        timeout_s: seconds that become the timeout of every group, so that ranks wait while the user looks around; None
            to keep the timeouts.

    Raises:
        ValueError: init_process_group has not been called.
        RuntimeError: pdb is to start on this rank, whose standard input is /dev/null or closed.
        Exception: as for barrier.
    """
    caller = sys._getframe(1)
    place = caller.f_code.co_filename, caller.f_lineno
    session = require_session()
    if _skipped[place] < skip:
        _skipped[place] += 1
        return
    if timeout_s is not None:
        for group in [session.group, *session.groups]:
            group._communicator.set_timeout(timeout_s)
    if get_rank() == rank:
        import pdb  # noqa: T100  # not with every program

        debugger = pdb.Pdb(stdin=_stdin(rank), stdout=sys.stdout)
        debugger.message(f"rank {rank}: breakpoint at {place[0]}:{place[1]}; 'up' goes there, 'c' continues")
        debugger.set_trace()
    barrier()


def _stdin(rank: int) -> TextIO:
    """Return the process's standard input: multiprocessing replaces ``sys.stdin`` in its children."""
    try:
        if os.path.samestat(os.fstat(0), os.stat(os.devnull)):
            raise RuntimeError(
                f"rank {rank} cannot start pdb: its standard input is {os.devnull}; start the job from a terminal, "
                "which 'rankmesh run' passes on to all ranks, or break on rank 0"
            )
        return sys.stdin if sys.stdin is not None and sys.stdin.fileno() == 0 else open(0, closefd=False)
    except OSError as error:
        raise RuntimeError(f"rank {rank} cannot start pdb: its standard input is closed ({error})") from error
