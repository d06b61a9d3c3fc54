"""Frames of Python's stack: whose code they run, and the line of the user's program that makes a call."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from types import FrameType

from rankmesh_agent.wire.schemas import FrameOrigin

OWN_PACKAGES = ("rankmesh", "rankmesh_agent", "rankmesh_gateway")
_LIBRARY_PARTS = ("/site-packages/", "/dist-packages/", "/lib/python3.")


@functools.cache
def _library_prefixes() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return ("<frozen ", *(f"{paths[name]}/" for name in ("stdlib", "platstdlib")))


def origin(file: str, module: object) -> FrameOrigin:
    """Return whose code a frame runs, by its file and the name of its module."""
    if isinstance(module, str) and module.partition(".")[0] in OWN_PACKAGES:
        return "rankmesh"
    if file.endswith((".pyx", ".pxi")):  # compiled by Cython: a path in the source tree of its package
        return "rankmesh" if "rankmesh_agent/native/" in file else "library"
    if file.startswith(_library_prefixes()) or any(part in file for part in _LIBRARY_PARTS):
        return "library"
    return "user"


def user_frame() -> FrameType | None:
    """Return this thread's innermost frame of the user's code; None in a thread that RankMesh has started."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and origin(frame.f_code.co_filename, frame.f_globals.get("__name__")) != "user":
        frame = frame.f_back
    return frame


def call_site() -> str:
    """Return the line of the user's code that makes a call, ``train.py:8 in step``; empty without one."""
    frame = user_frame()
    if frame is None:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_qualname}"
