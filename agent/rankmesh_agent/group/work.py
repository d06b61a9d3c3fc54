"""Work and Future of an asynchronous call, after torch.distributed.Work and torch.futures.Future."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from rankmesh_agent.net.deadline import Deadline, seconds_of
from rankmesh_agent.wire.errors import CollectiveTimeoutError, DistError, GroupAbortedError, without_traceback

_GRACE_SECONDS = 1.0
"""Time after its deadline by which a message ends at the latest: the thread that detects that has to be scheduled."""


_process = object()
"""Another object in a forked child, which lacks the threads that complete the operations of its parent."""


def _after_fork() -> None:
    global _process
    _process = object()


os.register_at_fork(after_in_child=_after_fork)


def _check_process(made_in: object) -> None:
    """Raise if an operation began in the process that has forked this one."""
    if made_in is not _process:
        raise GroupAbortedError(f"the operation is one of process {os.getppid()}, which has forked this one")


class Future:
    """Result of a Work, after torch.futures.Future.

    A callback given to ``then`` runs in the thread that completes the operation, or at once if it is complete.

    Args:
        worker: returns the thread that will complete the operation, None if it is not known.
        release: see ``release``.
    """

    def __init__(
        self, worker: Callable[[], threading.Thread | None] = lambda: None, release: Callable[[], bool] = lambda: True
    ) -> None:
        self._worker = worker
        self._release = release
        self._process = _process
        self._lock = threading.Lock()
        self._complete = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []

    def done(self) -> bool:
        """Return whether the operation has ended, well or not."""
        return self._complete.is_set()

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the end, at most ``timeout`` seconds; return the value or raise the operation's error.

        Raises:
            TimeoutError: the operation goes on.
            RuntimeError: this is a callback, and the operation comes after it.
        """
        if not self._complete.is_set():
            _check_process(self._process)
        if not self._complete.is_set() and threading.current_thread() is self._worker():
            raise RuntimeError("waiting in a callback for a later call of the group would wait for itself: use then()")
        if not self._complete.wait(timeout):
            raise TimeoutError(f"the operation did not end within {timeout} s")
        return self.value()

    def value(self) -> Any:
        """Return the value of a future that is done, or raise its error.

        Raises:
            RuntimeError: it is not done.
        """
        if not self._complete.is_set():
            raise RuntimeError("value() before the operation is complete; call wait() first")
        if self._error is not None:
            raise without_traceback(self._error)
        return self._value

    def release(self) -> bool:
        """Relieve this thread, which runs a callback, of completing calls; return whether it holds up none.

        For a callback that is about to block, or to wait for later calls. Another thread completes the next calls then;
        False if a call is queued already.
        """
        return self._release()

    def then(self, callback: Callable[[Future], Any]) -> Future:
        """Return a future of what ``callback(self)`` will return."""
        following = Future(self._worker, self._release)

        def run() -> None:
            try:
                following.set_result(callback(self))
            except BaseException as error:
                following.set_exception(error)

        with self._lock:
            if not self._complete.is_set():
                self._callbacks.append(run)
                return following
        run()
        return following

    def set_result(self, value: Any) -> None:
        """Complete the future with a value."""
        self._finish(value, None)

    def set_exception(self, error: BaseException) -> None:
        """Complete the future with an error."""
        self._finish(None, error)

    def _finish(self, value: Any, error: BaseException | None) -> None:
        with self._lock:
            self._value, self._error = value, error and without_traceback(error)
            self._complete.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class Work(ABC):
    """An operation that runs while its caller does something else."""

    @abstractmethod
    def is_completed(self) -> bool:
        """Return whether the operation has ended, well or not."""

    @abstractmethod
    def exception(self) -> BaseException | None:
        """Return the error of an operation that failed."""

    @abstractmethod
    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait for the end.

        Args:
            timeout: how long, as timedelta or seconds; None, or 0 as torch's default, for the operation's own limit.

        Returns:
            True.

        Raises:
            CollectiveTimeoutError: ``timeout`` passed; the operation goes on.
            DistError: the operation failed.
        """

    def synchronize(self) -> None:
        """Wait for the end, as ``wait()``: in host memory there is no stream to wait for instead."""
        self.wait()

    @abstractmethod
    def result(self) -> list[Any]:
        """Return the arrays of the operation, once it is complete."""

    @abstractmethod
    def get_future(self) -> Future:
        """Return a future whose value is ``result()``."""

    def is_success(self) -> bool:
        """Return whether the operation has ended well."""
        return self.is_completed() and self.exception() is None

    def source_rank(self) -> int:
        """Return the global rank of a received message's sender.

        Raises:
            RuntimeError: this is not a receive.
        """
        raise RuntimeError("source_rank() is only known for a receive")


def wait_limit(timeout: timedelta | float | None) -> float | None:
    """Return the seconds of a wait's timeout; None, the operation's own limit, also for 0: torch's default.

    Raises:
        ValueError: the timeout is negative.
    """
    return (None if timeout is None else seconds_of(timeout, 0.0)) or None


def _repr(operation: str, done: bool, error: BaseException | None) -> str:
    state = "running" if not done else "done" if error is None else f"failed: {error}"
    return f"<Work {operation}, {state}>"


class QueuedWork(Work):
    """A call in a group's queue.

    Args:
        run: executes the call.
        arrays: the user's arrays that it fills.
        described: description of the call.
        worker: returns the thread that will execute it.
        release: relieves that thread; see Future.
    """

    def __init__(
        self,
        run: Callable[[], None],
        arrays: list[Any],
        described: str,
        worker: Callable[[], threading.Thread | None] = lambda: None,
        release: Callable[[], bool] = lambda: True,
    ) -> None:
        self._run = run
        self._arrays = arrays
        self._described = described
        self._future = Future(worker, release)
        self._claimed = threading.Lock()
        self._withdrawn = False

    def __repr__(self) -> str:
        return _repr(self._described, self.is_completed(), self.exception())

    def run(self, ended: Callable[[], object] = lambda: None) -> None:
        """Execute the call, in the group's worker thread; then release its arguments.

        Args:
            ended: called between its end and the callbacks.
        """
        run = self._run
        del self._run
        try:
            run()
        except BaseException as error:
            ended()
            self._future.set_exception(error)
        else:
            ended()
            if not self._withdrawn:
                self._future.set_result(self._arrays)

    def claim(self) -> bool:
        """Begin; return whether the call is still to be executed. From now on it cannot be withdrawn."""
        return self._claimed.acquire(False)

    def withdraw(self, error: BaseException) -> bool:
        """Fail the call instead of executing it; return whether that was possible, because it had not begun."""
        if not self._claimed.acquire(False):
            return False
        self._withdrawn = True
        self._future.set_exception(error)
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def exception(self) -> BaseException | None:
        return self._future._error

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        seconds = wait_limit(timeout)
        try:
            self._future.wait(seconds)
        except TimeoutError as error:
            if self._future.done():
                raise
            raise CollectiveTimeoutError(
                f"{self._described} did not end within {seconds:.3g} s of waiting; it goes on", op=self._described
            ) from error
        return True

    def result(self) -> list[Any]:
        if not self._future.done():
            raise RuntimeError("result() before the operation is complete; call wait() first")
        self._future.value()
        return self._arrays

    def get_future(self) -> Future:
        return self._future


class MessageWork(Work):
    """Work of a point-to-point message. Of several threads that wait for it one completes it, the others wait for that.

    Args:
        complete: waits for the message until a deadline and raises its error; with None it does not wait, and returns
            whether the message is done.
        arrays: the user's arrays.
        deadline: the operation's own.
        source: returns the global rank of a received message's sender.
        abandon: gives the message up because of an error: waits for it fail, and if its data is on the way, the group
            ends, too.

    Attributes:
        abandon: see above.
    """

    def __init__(
        self,
        complete: Callable[[Deadline | None], bool],
        arrays: list[Any],
        deadline: Deadline,
        source: Callable[[], int] | None = None,
        abandon: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._complete_message = complete
        self._arrays = arrays
        self._deadline = deadline
        self._source = source
        self.abandon = abandon
        self._process = _process
        self._completing = threading.Lock()
        self._done = False
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        return _repr("send" if self._source is None else "recv", self._done, self._error)

    def is_completed(self) -> bool:
        if not self._done and self._process is _process and self._completing.acquire(False):
            try:
                self._done = self._done or self._complete_message(None)
            except DistError as error:
                self._error, self._done = without_traceback(error), True
            finally:
                self._completing.release()
        return self._done

    def exception(self) -> BaseException | None:
        self.is_completed()
        return self._error

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        seconds = wait_limit(timeout)
        own = self._deadline if seconds is None else Deadline(seconds)
        if not self._done:
            _check_process(self._process)
            # The error of another thread that completes it, at the operation's deadline, names the missing rank.
            grace = _GRACE_SECONDS if seconds is None else 0.0
            if not self._completing.acquire(False) and not self._completing.acquire(timeout=own.remaining() + grace):
                raise CollectiveTimeoutError(
                    f"the message did not end within {own.seconds:.3g} s of waiting; another thread still waits for it"
                )
            try:
                self._done = self._done or self._complete_message(own)
            except DistError as error:
                if seconds is None or not isinstance(error, CollectiveTimeoutError):
                    self._error, self._done = without_traceback(error), True
                raise
            finally:
                self._completing.release()
        if self._error is not None:
            raise without_traceback(self._error)
        return True

    def result(self) -> list[Any]:
        self.wait()
        return self._arrays

    def get_future(self) -> Future:
        """Not available.

        Raises:
            RuntimeError: always; torch has none for point-to-point operations either.
        """
        raise RuntimeError("get_future() is not available for point-to-point operations; use wait()")

    def source_rank(self) -> int:
        if self._source is None:
            return super().source_rank()
        self.wait()
        return self._source()
