"""End of this process, by an uncaught exception or an exit, for the errors of ranks that still wait for it."""

from __future__ import annotations

import contextlib
import gc
import io
import sys
from typing import NamedTuple

from rankmesh_agent.wire.errors import DistError

_MAX_CHARACTERS = 500


class ProcessExit(NamedTuple):
    """End of a process; ``error``: its exception, or the explicit cause of that, if it is one of RankMesh's."""

    reason: str = ""
    raised: bool = False
    error: DistError | None = None
    exit_text: str = ""
    place: str = ""


def at_exit() -> ProcessExit:
    """Return how the process ends; for exit handlers.

    Python keeps an uncaught exception for them, but no SystemExit with its status; a process of ``spawn`` does.
    """
    error = getattr(sys, "last_value", None)
    if error is None or hasattr(sys, "ps1"):  # an interactive session goes on after an exception
        return ProcessExit(exit_text="it exited without destroy_process_group")
    if isinstance(error, SystemExit):
        from rankmesh._launcher.child import exit_status

        return ProcessExit(f"it exited with status {exit_status(error)} without destroy_process_group")
    return ProcessExit(f"it ended with {_text(error)}", True, _dist_error(error), place=_place(error))


def skip_collection() -> None:
    """After an uncaught exception, have Python end without its collections of garbage: with torch they take a second.

    An exit handler of a launched rank, for whose end a restart waits. What the collections would write is written here:
    the buffers of files that are open.
    """
    if getattr(sys, "last_value", None) is None:
        return
    for file in gc.get_objects():
        if type(file) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
            with contextlib.suppress(OSError, ValueError):  # no room, no reader; or it is closed
                file.flush()
    gc.freeze()


def at_destroy(error: BaseException | None) -> ProcessExit:
    """Return how the process leaves by destroy_process_group, by the exception that propagates, if there is one."""
    if error is None:
        return ProcessExit()
    text = f"it called destroy_process_group after {_text(error)}"
    return ProcessExit(error=_dist_error(error), exit_text=text, place=_place(error))


def _place(error: BaseException) -> str:
    from rankmesh._launcher.tracebacks import place

    return place(error)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")[:_MAX_CHARACTERS]


def _dist_error(error: BaseException | None) -> DistError | None:
    """Return the error, or the first of its explicit causes, that is RankMesh's."""
    while error is not None and not isinstance(error, DistError):
        error = error.__cause__
    return error
