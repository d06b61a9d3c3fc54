"""Works that the group's methods return to torch, with torch's futures, and the threads that complete these."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d

from rankmesh._session.session import leave_at_exit
from rankmesh.torch._errors import to_torch_error, translating
from rankmesh_agent.group import work as engine
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.wire.errors import DistError


class CompletedWork(c10d.Work):
    """Work of a call that completed before it returned."""

    def __init__(self, tensors: list[Any], source: int | None = None) -> None:
        super().__init__()
        self._tensors = tensors
        self._source = source

    def is_completed(self) -> bool:
        """Return whether the call has ended."""
        return True

    def is_success(self) -> bool:
        """Return whether the call has succeeded."""
        return True

    def exception(self) -> BaseException | None:
        """Return the error of a failed call, else None."""
        return None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # torch's default, never changed
        """Wait for the end of the call; 0 stands for the call's own timeout."""
        return True

    def synchronize(self) -> None:
        """Wait for the end of the call; there is no stream to wait for instead."""
        self.wait()

    def block_current_stream(self) -> None:
        """See synchronize."""
        self.wait()

    def result(self) -> list[Any]:
        """Return the tensors."""
        self.wait()
        return self._tensors

    def source_rank(self) -> int:
        """Return the source of a receive, as a group rank."""
        if self._source is None:
            raise RuntimeError("source_rank() is only known for a receive")
        return self._source

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> torch.futures.Future[list[Any]]:
        """Return a future whose value is the tensors."""
        future: torch.futures.Future[list[Any]] = _future(self._tensors)
        future.set_result(self._tensors)
        return future


class PendingWork(CompletedWork):
    """Work of an asynchronous call."""

    def __init__(self, tensors: list[Any], works: Sequence[engine.Work]) -> None:
        super().__init__(tensors)
        self._works = works
        self._lock = threading.Lock()
        self._future: torch.futures.Future[list[Any]] | None = None

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        found = next((error for work in self._works if (error := work.exception()) is not None), None)
        return to_torch_error(found) if isinstance(found, DistError) else found

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        limit = timeout if timeout > timedelta(0) else None
        try:
            for work in self._works:
                work.wait(limit)
        except DistError as error:
            raise to_torch_error(error) from error.__cause__
        future = self._future
        if future is not None and not future.done():
            future.wait()  # torch's C++ reads the future's value once it has waited for the Work
        return True

    def get_future(self) -> torch.futures.Future[list[Any]]:
        """Return a future whose value is the tensors; it completes without a wait.

        DDP waits in torch's C++, which takes only an error that a callback raises; so the future is that of a callback
        that returns the tensors or raises the call's error.
        """
        with self._lock:
            if self._future is None:
                ended: torch.futures.Future[None] = _future(self._tensors)
                self._future = ended.then(lambda _: self._outcome())
                if self.is_completed():
                    ended.set_result(None)
                else:
                    _when_all_done(self._works, lambda: ended.set_result(None))
            return self._future

    def _outcome(self) -> list[Any]:
        """Return the tensors of a call that has ended, or raise its error."""
        error = self.exception()
        if error is not None:
            raise error
        return self._tensors


class MessageWork(PendingWork):
    """Work of a point-to-point message; ``global_ranks``: of the members, by group rank."""

    def __init__(self, tensors: list[Any], work: engine.Work, global_ranks: Sequence[int]) -> None:
        super().__init__(tensors, [work])
        self._global_ranks = global_ranks

    def source_rank(self) -> int:
        return self._global_ranks.index(translating(self._works[0].source_rank))


def _future(tensors: list[Any]) -> torch.futures.Future[Any]:
    """Return a future for a call's tensors: for those on GPUs it records and awaits events of the current streams."""
    found = {tensor.device for tensor in tensors if tensor.is_cuda}
    return torch.futures.Future(devices=list(found) or None)


def _when_all_done(works: Sequence[engine.Work], then: Callable[[], None]) -> None:
    """Call ``then`` once all works have ended or failed, in a thread that blocks no other call."""
    left = len(works)
    lock = threading.Lock()

    def one(ended: engine.Future) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            then() if ended.release() else run_in_thread(then)

    for work in works:
        work.get_future().then(one)


# Threads for the callbacks of futures


_EXIT_SECONDS = 5.0
"""Longest wait at exit for running callbacks."""
_Callbacks = queue.SimpleQueue[Callable[[], None]]
_idle: list[_Callbacks] = []
"""Of the threads that have no callback."""
_running: set[_Callbacks] = set()


def run_in_thread(callback: Callable[[], None]) -> None:
    """Call a function in a thread of its own, which stays for later ones: the start of one takes longer than DDP's.

    A callback may wait for another call of the same group, which needs a thread to complete; so callbacks run neither
    in the group's worker thread nor one behind another.
    """
    try:
        given = _idle.pop()
    except IndexError:
        given = queue.SimpleQueue()
        threading.Thread(target=_run, args=(given,), name="rankmesh-callback", daemon=True).start()
    _running.add(given)
    given.put(callback)


def _run(given: _Callbacks) -> None:
    while True:
        callback = given.get()
        try:
            callback()
        finally:
            _running.discard(given)
        del callback  # with the user's tensors
        _idle.append(given)


def _end() -> None:
    """Wait for callbacks before Python ends: torch's C++ crashes if they end later.

    The threads are daemons, and the sessions end first; so no callback waits for a rank that never comes.
    """
    leave_at_exit()
    deadline = Deadline(_EXIT_SECONDS)
    with contextlib.suppress(KeyboardInterrupt):  # Python would print its traceback, and go on
        while _running and not deadline.expired():
            time.sleep(0.001)


atexit.register(_end)
for _threads in (_idle, _running):
    os.register_at_fork(after_in_child=_threads.clear)
