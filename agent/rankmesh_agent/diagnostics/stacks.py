"""Python stacks of the threads of this process."""

from __future__ import annotations

import linecache
import sys
import threading
import traceback
from collections.abc import Sequence

from rankmesh_agent.net.callers import origin
from rankmesh_agent.wire.schemas import StackFrame, ThreadStack

_MAX_FRAMES = 200
"""Maximum frames of one thread; of a deeper stack, the innermost ones."""


def stacks(*, code: bool = True) -> list[ThreadStack]:
    """Return the stacks of all threads, the main thread's first, then by name; each from the outermost call inwards.

    Without ``code``, ``add_code`` adds the source lines later.
    """
    threads = {thread.ident: thread for thread in threading.enumerate()}
    found = []
    for ident, innermost in sys._current_frames().items():
        thread = threads.get(ident)
        calls = list(traceback.walk_stack(innermost))[:_MAX_FRAMES]
        frames = [
            StackFrame(
                frame.f_code.co_filename,
                line,
                frame.f_code.co_qualname,
                linecache.getline(frame.f_code.co_filename, line, frame.f_globals).strip() if code else "",
                origin(frame.f_code.co_filename, frame.f_globals.get("__name__")),
            )
            for frame, line in reversed(calls)
        ]
        name = thread.name if thread is not None else "(not made by Python)"
        native = thread.native_id if thread is not None else None
        found.append(ThreadStack(name, ident, native or 0, thread.daemon if thread is not None else False, frames))
    main = threading.main_thread().ident
    return sorted(found, key=lambda each: (each.ident != main, each.name, each.ident))


def add_code(found: Sequence[ThreadStack]) -> None:
    """Add the source lines to stacks that have none."""
    for stack in found:
        for frame in stack.frames:
            frame.code = linecache.getline(frame.file, frame.line).strip()


def as_text(found: Sequence[ThreadStack]) -> str:
    """Return stacks as text, in the format of tracebacks."""
    return "\n".join(_thread_text(each) for each in found)


def _thread_text(stack: ThreadStack) -> str:
    lines = [f"Thread {stack.name!r} (id {stack.native_id}{', daemon' if stack.daemon else ''}):"]
    for frame in stack.frames:
        lines.append(f'  File "{frame.file}", line {frame.line}, in {frame.function}')
        if frame.code:
            lines.append(f"    {frame.code}")
    return "\n".join([*lines, ""])
