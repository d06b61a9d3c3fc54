"""Location of a rank in the user's code, from the stacks of its threads. Pure: no I/O."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Thread = Mapping[str, Any]
"""The JSON of wire.schemas.ThreadStack."""
Frame = Mapping[str, Any]

_OWN_THREADS = ("rankmesh-", "asyncio_")


class SourceLocation(NamedTuple):
    """The innermost line of the user's code in a thread.

    Attributes:
        file, line, function, code: the line.
        library: the function of a library that the line calls, empty if there is none.
        in_rankmesh: whether the line calls RankMesh.
    """

    file: str
    line: int
    function: str
    code: str
    library: str = ""
    in_rankmesh: bool = False

    def __str__(self) -> str:
        text = f"{posixpath.basename(self.file)}:{self.line}"
        if self.function != "<module>":
            text += f" in {self.function}"
        return f"{text} (inside {self.library})" if self.library and not self.in_rankmesh else text


def user_threads(threads: Sequence[Thread]) -> list[Thread]:
    """Return the threads that run the user's code, the main thread first."""
    return [each for each in threads if _innermost(each["frames"]) is not None and not _is_own(each)]


def location_of(threads: Sequence[Thread], *, waits: bool) -> SourceLocation | None:
    """Return the location of a rank in the user's code; None if no thread runs the user's code.

    Args:
        threads: its threads, the main thread first.
        waits: whether a call of RankMesh waits: then a thread that has made one is preferred to the main thread.
    """
    places = []
    for thread in user_threads(threads):
        index = _innermost(thread["frames"])
        assert index is not None
        frame, inner = thread["frames"][index], thread["frames"][index + 1 :]
        own = any(each["origin"] == "rankmesh" for each in inner)
        library = str(inner[0]["function"]) if inner and not own else ""
        places.append(SourceLocation(frame["file"], frame["line"], frame["function"], frame["code"], library, own))
    calling = [place for place in places if place.in_rankmesh]
    return next(iter(calling if waits and calling else places), None)


def short(frame: Frame) -> str:
    """Return the place of a frame: the last part of its path, and the line."""
    return f"{posixpath.basename(frame['file'])}:{frame['line']}"


def folded(frames: Sequence[Frame]) -> list[Frame | list[Frame]]:
    """Return frames with each run of those that are not the user's as one list."""
    found: list[Frame | list[Frame]] = []
    for frame in frames:
        if frame["origin"] == "user":
            found.append(frame)
        elif found and isinstance(found[-1], list) and found[-1][0]["origin"] == frame["origin"]:
            found[-1].append(frame)
        else:
            found.append([frame])
    return found


def _innermost(frames: Sequence[Frame]) -> int | None:
    return next((index for index in reversed(range(len(frames))) if frames[index]["origin"] == "user"), None)


def _is_own(thread: Thread) -> bool:
    return str(thread["name"]).startswith(_OWN_THREADS)
