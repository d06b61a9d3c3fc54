"""Dumps of the flight recorder: a file of each rank from the moment in which a group failed, for a diagnosis later."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

from rankmesh_agent.diagnostics.stacks import add_code, stacks
from rankmesh_agent.wire.errors import DistError
from rankmesh_agent.wire.schemas import ThreadStack
from rankmesh_agent.wire.snapshot import RankDump

_AGAIN_SECONDS = 60.0
"""Time after a dump in which further failures write none: they follow from the first one."""
_CLOSE_SECONDS = 5.0
_MAX_JOB = 100

_log = logging.getLogger("rankmesh")


class DumpWriter:
    """Writes a rank's dump when a group fails, in a thread.

    Args:
        take: returns the dump as of a time by the monotonic clock, with these messages awaited (see
            ``snapshot.add_calls``), without failure and stacks.
        awaited: returns the messages for which a thread waits.
    """

    def __init__(
        self,
        directory: str,
        take: Callable[[float, Collection[float]], RankDump],
        awaited: Callable[[], set[float]],
    ) -> None:
        self._directory = Path(directory)
        with contextlib.suppress(FileNotFoundError):  # the working directory is gone: a relative path leads nowhere
            self._directory = self._directory.absolute()
        self._take = take
        self._awaited = awaited
        self._last: float | None = None
        self._thread: threading.Thread | None = None

    def on_failure(self, error: DistError, begun: float | None) -> None:
        """Begin to write a dump; see FlightRecorder. Does not wait: groups call it with their lock held."""
        now = time.monotonic()
        if self._last is not None and now - self._last < _AGAIN_SECONDS:
            return
        self._last = now
        thread = threading.Thread(
            target=self._write,
            args=(now, error, self._awaited() | ({begun} if begun is not None else set()), stacks(code=False)),
            name="rankmesh-dump",
            daemon=True,
        )
        with contextlib.suppress(RuntimeError):  # the interpreter ends
            thread.start()
            self._thread = thread

    def close(self) -> None:
        """Wait for a dump that is being written."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_SECONDS)

    def _write(self, at: float, error: DistError, awaited: set[float], found: list[ThreadStack]) -> None:
        try:
            dump = self._take(at, awaited)
            dump.failure = f"{type(error).__name__}: {error}"
            dump.failed_ranks = list(error.ranks)
            add_code(found)
            dump.stacks = found
            path = self._directory / file_name(dump.job, dump.epoch, dump.rank)
            self._directory.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._directory, prefix=".rankmesh-", delete=False) as file:
                try:
                    json.dump(dump, file, default=vars)
                    file.flush()
                    os.replace(file.name, path)
                except BaseException:
                    os.unlink(file.name)
                    raise
        except OSError as problem:
            _log.warning("no dump of the flight recorder was written to %s: %s", self._directory, problem)
        else:
            _log.info("the flight recorder was written to %s", path)


def file_name(job: str, epoch: int, rank: int) -> str:
    """Return the name of a rank's dump."""
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', job)[:_MAX_JOB]}-epoch-{epoch}-rank-{rank}.json"
