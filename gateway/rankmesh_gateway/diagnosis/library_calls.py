"""Calls of communication libraries in the stacks of ranks whose traffic is not RankMesh's. Pure: no I/O."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from rankmesh_gateway.diagnosis.frames import SourceLocation, Thread, location_of, user_threads

_FILES = (
    "/mpi4py/",
    "/torch/distributed/",
    "/torch/autograd/",
    "/torch/cuda/__init__.py",
    "/torch/nn/parallel/distributed.py",
    "/ray/_private/worker.py",
    "/ray/util/collective/",
    "/jax/_src/array.py",
    "/jax/experimental/multihost_utils.py",
)
"""Parts of the paths of functions that wait for other ranks: in ``backward`` those of DistributedDataParallel."""
_WRAPPERS = ("wrapper", "auto_init_wrapper", "inner")
"""Names of functions of these libraries that stand for others."""
_COMPILED = re.compile(
    r"(neighbor_)?(all)?(gather|toall)[vw]?|scatterv?|bcast|barrier|(all)?reduce(_scatter(_block)?)?|(ex)?scan|split|dup|free"
    r"|[bsr]?send|send_?recv(_replace)?|recv|m?probe|wait(all|any|some)?|fence|lock|spawn|create_group|disconnect"
    r"|item|synchronize",
    re.IGNORECASE,
)
"""Names of functions of mpi4py and torch that are compiled, so that a stack ends at the line that calls
them: mpi4py's, waits for requests, and torch's waits for the GPU, where NCCL's calls end."""
_CALL = re.compile(r"\.(\w+)\s*\(")


class LibraryCall(NamedTuple):
    """A call of a library in which a rank waits for others.

    Attributes:
        kind: whether it is a message; all others are taken for collectives.
        name: its name.
        op: the name, but ``send`` or ``recv`` for a message.
        place: the line that makes it.
    """

    kind: Literal["collective", "message"]
    name: str
    op: str
    place: SourceLocation


def library_call(threads: Sequence[Thread]) -> LibraryCall | None:
    """Return the call in which a rank's first thread with a line of the user's is; None if that is in none."""
    place = location_of(threads, waits=False)
    if place is None:
        return None
    frames = user_threads(threads)[0]["frames"]
    user = max(index for index, frame in enumerate(frames) if frame["origin"] == "user")
    name = _called([(frame["file"], frame["function"]) for frame in frames[user + 1 :]], place.code)
    if not name:
        return None
    low = name.lower()
    way = "recv" if "recv" in low or "probe" in low else "send" if low.endswith("send") else ""
    return LibraryCall("message" if way else "collective", name, way or name, place._replace(library=""))


def _called(inner: Sequence[tuple[str, str]], code: str) -> str:
    """Return the name of the library's function that a line calls, from the frames below the line, and its code."""
    if inner:
        part = next((part for part in _FILES if part in inner[-1][0]), None)
        names = (function.rpartition(".")[2] for file, function in inner if part is not None and part in file)
        return next((name for name in names if name not in _WRAPPERS), "")
    if code.startswith(("from mpi4py", "import mpi4py")):
        return "MPI_Init"
    return next((name for name in _CALL.findall(code) if _COMPILED.fullmatch(name)), "")
