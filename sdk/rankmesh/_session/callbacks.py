"""The user's functions for failures of ranks: called in a thread of their own, while this rank computes or waits."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING

from rankmesh_agent.wire.errors import DistBackendError

if TYPE_CHECKING:
    from rankmesh_agent.agent import Agent
    from rankmesh_agent.remote.agent import RemoteAgent

_log = logging.getLogger("rankmesh")

_CLOSE_SECONDS = 1.0
"""Time limit for a callback that runs when the session ends."""

FailureCallback = Callable[[DistBackendError], object]


class RemovableHandle:
    """A registered callback.

    Args:
        remove: unregisters it.
    """

    def __init__(self, remove: Callable[[], None]) -> None:
        self._remove = remove

    def remove(self) -> None:
        """Unregister the callback; a call of it that is under way goes on. Does nothing the second time."""
        self._remove()


class FailureCallbacks:
    """Callbacks of one session. For several threads."""

    def __init__(self, agent: Agent | RemoteAgent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._callbacks: dict[int, FailureCallback] = {}
        self._numbers = 0
        self._errors: SimpleQueue[DistBackendError | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, callback: FailureCallback) -> RemovableHandle:
        """Register a callback; the first one of a session is called with the failures before, too."""
        with self._lock:
            self._numbers += 1
            number = self._numbers
            self._callbacks[number] = callback
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rankmesh-failures", daemon=True)
                self._thread.start()
                self._agent.watch_failures(self._errors.put)
        return RemovableHandle(lambda: self._callbacks.pop(number, None) and None)

    def follow(self, agent: Agent | RemoteAgent) -> None:
        """Report the failures of the world of another epoch from now on."""
        with self._lock:
            self._agent = agent
            if self._thread is not None:
                agent.watch_failures(self._errors.put)

    def close(self) -> None:
        """End the thread, after the callbacks for the failures that are known."""
        self._errors.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while (error := self._errors.get()) is not None:
            for callback in list(self._callbacks.values()):
                try:
                    callback(error)
                except Exception:
                    _log.exception("a callback of on_failure raised an exception")
