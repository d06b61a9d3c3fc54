"""Work and Future of an asynchronous call, after torch.distributed.Work and torch.futures.Future."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any, Protocol

from rankmesh_agent.group.watchdog import Watchdog
from rankmesh_agent.net.deadline import Deadline, seconds_of
from rankmesh_agent.wire.errors import CollectiveTimeoutError, DistError, GroupAbortedError, without_traceback

_GRACE_SECONDS = 1.0
"""Time after its deadline by which a message ends at the latest: the thread that detects that has to be scheduled."""
_MIN_PAUSE, _MAX_PAUSE = 0.0002, 0.02
"""Shortest and longest pause between two looks at a message that has a future: a tenth of the time since its begin."""
_SUCCESS, _TIMEOUT, _COMM_ERROR, _UNKNOWN = 0, 1, 2, 100
"""torch's WorkResult."""
_process = object()
"""Another object in a forked child, which lacks the threads that complete the operations of its parent."""


_MESSAGES = "rankmesh-messages"
_messages = Watchdog(_MESSAGES, 0.0)
"""The thread that completes messages that have futures."""


def _after_fork() -> None:
    global _process, _messages
    _process, _messages = object(), Watchdog(_MESSAGES, 0.0)


os.register_at_fork(after_in_child=_after_fork)


def _check_process(made_in: object) -> None:
    """Raise if an operation began in the process that has forked this one."""
    if made_in is not _process:
        raise GroupAbortedError(f"the operation is one of process {os.getppid()}, which has forked this one")


class Future:
    """Result of a Work, after torch.futures.Future; ``await`` waits for it in an event loop of asyncio.

    A callback given to ``then`` runs in the thread that completes the operation, or at once if it is complete.

    Args:
        worker: returns the thread that will complete the operation, None if it is not known.
    """

    def __init__(
        self, worker: Callable[[], threading.Thread | None] = lambda: None, release: Callable[[], bool] = lambda: True
    ) -> None:
        self._worker = worker
        self._release = release
        self._process = _process
        self._lock = threading.Lock()
        self._done = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], object]] = []

    def done(self) -> bool:
        """Return whether the operation has ended, well or not."""
        return self._done

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the end, at most ``timeout`` seconds; return the value or raise the operation's error.

        Raises:
            TimeoutError: the operation goes on.
            RuntimeError: this is a callback, and the operation comes after it.
        """
        if not self._done:
            _check_process(self._process)
            if threading.current_thread() is self._worker():
                raise RuntimeError(
                    "waiting in a callback for a later call of the group would wait for itself: use then()"
                )
            ended = threading.Lock()
            ended.acquire()
            with self._lock:
                if not self._done:
                    self._callbacks.insert(0, ended.release)  # before callbacks, which may take long
            try:
                if not self._done and not ended.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
                    raise TimeoutError(f"the operation did not end within {timeout} s")
            finally:
                with self._lock, contextlib.suppress(ValueError):
                    self._callbacks.remove(ended.release)
        return self.value()

    def value(self) -> Any:
        """Return the value of a future that is done, or raise its error.

        Raises:
            RuntimeError: it is not done.
        """
        if not self._done:
            raise RuntimeError("value() before the operation is complete; call wait() first")
        if self._error is not None:
            raise without_traceback(self._error)
        return self._value

    def exception(self) -> BaseException | None:
        """Return the error of an operation that failed."""
        return self._error

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

        self._call_back(run)
        return following

    def _call_back(self, run: Callable[[], object]) -> None:
        """Call a function once the operation has ended."""
        with self._lock:
            if not self._done:
                self._callbacks.append(run)
                return
        run()

    def set_result(self, value: Any) -> None:
        """Complete the future with a value."""
        self._finish(value, None)

    def set_exception(self, error: BaseException) -> None:
        """Complete the future with an error."""
        self._finish(None, without_traceback(error))

    def _finish(self, value: Any, error: BaseException | None) -> None:
        with self._lock:
            self._value, self._error, self._done = value, error, True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for the end as ``wait()`` does, in a task; if the task is cancelled, the operation goes on."""
        if not self._done:
            from asyncio import get_running_loop  # its import takes longer than that of the SDK

            _check_process(self._process)
            loop = get_running_loop()
            ended = loop.create_future()

            def resolve() -> None:
                if not ended.done():  # the task was cancelled
                    ended.set_result(None)

            def wake() -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(resolve)

            self._call_back(wake)
            yield from ended.__await__()
        return self.value()


class Message(Protocol):
    """A message that its Work completes.

    Attributes:
        op: ``send`` or ``recv``.
        deadline: the message's own.
    """

    op: str
    deadline: Deadline

    def complete(self, deadline: Deadline | None) -> bool:
        """Wait for the message until a deadline, or with None only look; return whether it is done, or raise."""

    def source(self) -> int:
        """Return the global rank of a received message's sender."""


class Work:
    """An operation that runs while its caller does something else; ``await`` waits for it in an event loop of asyncio.

    The group's worker completes a call. A message is completed by a thread that waits for it: by one of several, while
    the others wait for that one.

    Args:
        operation: text that names the operation.
        arrays: the user's arrays.
        future: completes with a call; left out for a message.
        message: the message; None for a call.
    """

    def __init__(
        self, operation: str, arrays: list[Any], future: Future | None = None, message: Message | None = None
    ) -> None:
        self._operation = operation
        self._arrays = arrays
        self.message = message
        self._future = future or Future(lambda: _messages.thread, _releases)
        self._claimed = threading.Lock()  # by the thread that completes the operation; for a call once and for all

    def __repr__(self) -> str:
        error = self.exception()
        state = f"failed: {error}" if error is not None else "done" if self.is_completed() else "running"
        return f"<Work {self._operation}, {state}>"

    def is_completed(self) -> bool:
        """Return whether the operation has ended, well or not."""
        future, message = self._future, self.message
        if message is not None and not future._done and future._process is _process and self._claimed.acquire(False):
            with contextlib.suppress(DistError):  # the future has it
                self._complete(message, None)
        return future._done

    def is_success(self) -> bool:
        """Return whether the operation has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of an operation that failed."""
        self.is_completed()
        return self._future.exception()

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
        seconds = wait_limit(timeout)
        if self.message is not None and not self._future._done:
            self._wait_for_message(self.message, seconds)
            return True
        try:
            self._future.wait(seconds)
        except TimeoutError as error:
            if self._future._done:
                raise
            raise CollectiveTimeoutError(
                f"{self._operation} did not end within {seconds:.3g} s of waiting; it goes on", op=self._operation
            ) from error
        return True

    def synchronize(self) -> None:
        """Wait for the end, as ``wait()``: in host memory there is no stream to wait for instead."""
        self.wait()

    block_current_stream = synchronize

    def __await__(self) -> Generator[Any, None, bool]:
        """Wait for the end as ``wait()`` does, in a task; if the task is cancelled, the operation goes on."""
        yield from self.get_future().__await__()
        return self.wait()

    def result(self) -> list[Any]:
        """Return the arrays of the operation, once it is complete; wait for a message."""
        if self.message is not None:
            self.wait()
        if not self._future._done:
            raise RuntimeError("result() before the operation is complete; call wait() first")
        arrays: list[Any] = self._future.value()
        return arrays

    def get_future(self) -> Future:
        """Return a future whose value is ``result()``."""
        if self.message is not None and not self.is_completed():
            _messages.add(self._look)
        return self._future

    def get_future_result(self) -> Future:
        """Return a future of torch's WorkResult: 0 for success, 1 for a timeout, 2 for another DistError, else 100."""

        def outcome(_: Future) -> int:
            error = self.exception()
            if isinstance(error, CollectiveTimeoutError):
                return _TIMEOUT
            return _SUCCESS if error is None else _COMM_ERROR if isinstance(error, DistError) else _UNKNOWN

        return self.get_future().then(outcome)

    def source_rank(self) -> int:
        """Return the global rank of a received message's sender.

        Raises:
            RuntimeError: this is not a receive.
        """
        if self.message is None or self.message.op != "recv":
            raise RuntimeError("source_rank() is only known for a receive")
        self.wait()
        return self.message.source()

    # Calls

    def claim(self) -> bool:
        """Begin; return whether the call is still to be executed. From now on it cannot be withdrawn."""
        return self._claimed.acquire(False)

    def withdraw(self, error: BaseException) -> bool:
        """Fail the call instead of executing it; return whether that was possible, because it had not begun."""
        if not self._claimed.acquire(False):
            return False
        self._future.set_exception(error)
        return True

    def end(self, error: BaseException | None) -> None:
        """Complete the call, unless it was withdrawn."""
        if self._future._done:
            return
        if error is None:
            self._future.set_result(self._arrays)
        else:
            self._future.set_exception(error)

    # Messages

    def _wait_for_message(self, message: Message, seconds: float | None) -> None:
        _check_process(self._future._process)
        own = message.deadline if seconds is None else Deadline(seconds)
        # The error of another thread that completes it, at the operation's deadline, names the missing rank.
        grace = _GRACE_SECONDS if seconds is None else 0.0
        if not self._claimed.acquire(False) and not self._claimed.acquire(timeout=own.remaining() + grace):
            raise CollectiveTimeoutError(
                f"the message did not end within {own.seconds:.3g} s of waiting; another thread still waits for it"
            )
        self._complete(message, own)

    def _complete(self, message: Message, deadline: Deadline | None) -> None:
        """Complete the message, which this thread has claimed, until a deadline, or with None only look."""
        try:
            if self._future._done:
                self._future.value()
            elif message.complete(deadline):
                self._future.set_result(self._arrays)
        except DistError as error:
            own = deadline is None or deadline is message.deadline
            if not self._future._done and (own or not isinstance(error, CollectiveTimeoutError)):
                self._future.set_exception(error)
            raise
        finally:
            self._claimed.release()

    def _look(self) -> float:
        """Complete the message if it has come or its deadline has passed; return the seconds until the next look."""
        assert self.message is not None
        deadline = self.message.deadline
        try:
            if not self.is_completed() and deadline.expired():
                self.wait()
        except BaseException as error:
            if not self._future._done:
                self._future.set_exception(error)
        if not self._future._done:
            return min(_MAX_PAUSE, max(_MIN_PAUSE, deadline.elapsed() / 10))
        _messages.remove(self._look)
        return 0.0


def _releases() -> bool:
    """Return whether this thread is another than the one that completes messages."""
    return threading.current_thread() is not _messages.thread


def wait_limit(timeout: timedelta | float | None) -> float | None:
    """Return the seconds of a wait's timeout; None, the operation's own limit, also for 0: torch's default.

    Raises:
        ValueError: the timeout is negative.
    """
    return (None if timeout is None else seconds_of(timeout, 0.0)) or None
