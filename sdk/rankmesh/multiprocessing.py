"""Processes on this machine: the standard library's multiprocessing, and ``spawn``, after torch.multiprocessing.

``import rankmesh.multiprocessing as mp`` where a script had ``import torch.multiprocessing as mp``: everything of the
standard library's module is here under its own name, and besides it

* ``spawn`` and ``start_processes``, which run a function as several ranks,
* ``ProcessContext`` (``SpawnContext`` is its old name), which they return,
* ``ProcessException`` with ``ProcessRaisedException`` and ``ProcessExitedException``, which they raise.
"""

from __future__ import annotations

import rankmesh_agent.config.linux  # noqa: F401  # checks the platform, first: a module of the standard library cannot

# isort: split
import contextlib
import functools
import multiprocessing
import os
import secrets
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import *  # noqa: F403
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

from rankmesh._launcher.child import importable, run
from rankmesh._launcher.failure import root_cause
from rankmesh._launcher.failure_file import VARIABLE, FailureFile
from rankmesh_agent.config.settings import Settings
from rankmesh_agent.net.inherited import receive_exit_statuses
from rankmesh_agent.net.interrupts import interrupts_deferred

__all__ = [
    "ProcessContext",
    "ProcessException",
    "ProcessExitedException",
    "ProcessRaisedException",
    "SpawnContext",
    "spawn",
    "start_processes",
]
__all__ += multiprocessing.__all__

_SETTLE_SECONDS = 5.0
"""Time in which the process that caused another one's failure may end by itself, as in the launcher."""
_STOP_SECONDS = 30.0
"""Time between a signal and SIGKILL, as in torch and in the launcher."""


class ProcessException(Exception):
    """A process of ``spawn`` failed.

    Attributes:
        msg: description.
        error_index: index of the process, the first argument of its function.
        error_pid: its process id.
    """

    def __init__(self, msg: str, error_index: int, error_pid: int) -> None:
        super().__init__(msg)
        self.msg = msg
        self.error_index = error_index
        self.error_pid = error_pid

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.msg, self.error_index, self.error_pid)


class ProcessRaisedException(ProcessException):
    """A process's function raised an exception; the message has its traceback."""


class ProcessExitedException(ProcessException):
    """A process exited with a code other than 0, or a signal ended it.

    Attributes:
        exit_code: the exit code; minus the signal's number if one ended it.
        signal_name: the signal's name; None if the process exited.
    """

    def __init__(
        self, msg: str, error_index: int, error_pid: int, exit_code: int, signal_name: str | None = None
    ) -> None:
        super().__init__(msg, error_index, error_pid)
        self.exit_code = exit_code
        self.signal_name = signal_name

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.msg, self.error_index, self.error_pid, self.exit_code, self.signal_name)


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> ProcessContext | None:
    """Run ``fn(i, *args)`` in ``nprocs`` new processes, ``i`` from 0 to ``nprocs`` - 1.

    After a failure the other processes are terminated, and its cause is raised: the failure of the rank that the errors
    of the others name, which has 5 seconds to end if it is not the first. Ctrl-C terminates all processes. If this
    process is killed, the kernel kills them, too.

    Unless RANKMESH_TOKEN is set, the processes receive a random token, the same for all that this process starts; the
    environment of this process does not change. Set RANKMESH_TOKEN if other processes take part in their job.

    Args:
        fn: function of the processes; importable, so defined at the top level of a module. One that is defined in a
            notebook or an interactive session is sent by value, which needs cloudpickle.
        args: its arguments after ``i``; picklable.
        nprocs: number of processes.
        join: wait until all have ended.
        daemon: whether the processes are daemonic: terminated when this process exits, and without children.
        start_method: ``"spawn"``; ``start_processes`` takes others.

    Returns:
        None after waiting, else the ProcessContext to wait with.

    Raises:
        ProcessRaisedException: the function raised an exception; the message has its traceback.
        ProcessExitedException: a process exited with a code other than 0, or a signal terminated it.
        TypeError: ``fn`` is not callable or cannot be sent by value, or ``args`` is not a tuple or list.
        ValueError: ``nprocs`` is less than 1.
        RuntimeError: SIGCHLD is ignored, and this is not the main thread, where ``spawn`` changes that.

    Source: https://pytorch.org/docs/2.1/multiprocessing.html#torch.multiprocessing.spawn.spawn
    """
    if start_method != "spawn":
        warnings.warn(
            f"spawn() ignores start_method={start_method!r}; call start_processes() with it",
            FutureWarning,
            stacklevel=2,
        )
    return start_processes(fn, args, nprocs, join, daemon)


def start_processes(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> ProcessContext | None:
    """Like ``spawn``, with any start method: ``"spawn"``, ``"fork"`` or ``"forkserver"``.

    Arguments, result and errors are those of ``spawn``. Forked processes are killed when the calling thread ends.

    Source: torch.multiprocessing.start_processes
    """
    if not callable(fn):
        raise TypeError(f"fn must be a function, got {type(fn).__qualname__}")
    if not isinstance(args, tuple | list):
        raise TypeError(f"args must be a tuple, got {type(args).__qualname__}; for one argument write (it,)")
    if nprocs < 1:
        raise ValueError(f"nprocs must be at least 1, got {nprocs}")
    make = multiprocessing.get_context(start_method)
    if make.get_start_method() != "fork":
        fn = importable(fn)
    token = Settings.from_env(os.environ).token or _fresh_token()
    receive_exit_statuses()
    context = ProcessContext()
    environment = {"RANKMESH_TOKEN": token, VARIABLE: context._failures.path}
    try:
        for index in range(nprocs):
            given = (fn, index, tuple(args), make.get_start_method(), environment)
            context._start(make.Process(target=run, args=given, daemon=daemon))  # type: ignore[attr-defined]
    except BaseException as error:
        context._end(_ending(error))
        raise
    if not join:
        return context
    while not context.join():
        pass
    return None


class ProcessContext:
    """The processes of one ``spawn``.

    Attributes:
        processes: the processes, by index.
        sentinels: index of each process that has not been joined, by the descriptor that signals its end.
    """

    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []
        self.sentinels: dict[int, int] = {}
        self._failures = FailureFile()
        self._failed: int | None = None

    def pids(self) -> list[int]:
        """Return the process ids, by index."""
        return [_pid(process) for process in self.processes]

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait until a process ends; if it failed, terminate the others and raise its error.

        Ctrl-C during the wait terminates all processes, a second one kills them.

        Args:
            timeout: seconds to wait; None without limit.
            grace_period: seconds for the others to end by themselves after a failure, and again after SIGTERM, before
                SIGKILL. By default they receive SIGTERM as soon as the cause of the failure has ended, or after 5
                seconds, and SIGKILL after 30 seconds.

        Returns:
            Whether all processes have ended.

        Raises:
            ProcessRaisedException: the function raised an exception; the message has its traceback.
            ProcessExitedException: a process exited with a code other than 0, or a signal terminated it.

        Source: torch.multiprocessing.ProcessContext
        """
        if self._failed is None:
            try:
                ended = self._await_one(timeout)
                first = self._first_failure([index for index in ended if self.processes[index].exitcode])
                if first is not None:
                    self._failed = first
                    self._failed = self._await_cause(first, _SETTLE_SECONDS if grace_period is None else grace_period)
                    self._await_all(grace_period or 0.0)
            except BaseException as error:
                self._end(_ending(error))
                raise
            if self._failed is not None:
                self._end(signal.SIGTERM, _STOP_SECONDS if grace_period is None else grace_period)
            elif not self.sentinels:
                self._failures.close()
        if self._failed is not None:
            raise self._error(self._failed)
        return not self.sentinels

    def _start(self, process: BaseProcess) -> None:
        with interrupts_deferred():
            process.start()
            self.sentinels[process.sentinel] = len(self.processes)
            self.processes.append(process)

    def _await_one(self, timeout: float | None) -> list[int]:
        """Wait until a process ends; return the indices of those that have ended."""
        ended = []
        for sentinel in connection.wait(list(self.sentinels), timeout) if self.sentinels else []:
            assert isinstance(sentinel, int)
            ended.append(self.sentinels.pop(sentinel))
            self.processes[ended[-1]].join()
        return ended

    def _await_all(self, seconds: float) -> None:
        """Wait until all processes have ended."""
        deadline = time.monotonic() + seconds
        while self.sentinels and (left := deadline - time.monotonic()) > 0:
            self._await_one(left)

    def _await_cause(self, first: int, seconds: float) -> int:
        """Return the index of the process whose failure caused that of the first one, once it has failed.

        A rank that leaves its job ends the others, and may take longer than they to end itself. If it does not fail by
        itself in time, the first failure stands.
        """
        deadline = time.monotonic() + seconds
        while True:
            cause = self._cause(first)
            if cause is None or self.processes[cause].exitcode or cause in self._failures.errors():
                return first if cause is None else cause
            left = deadline - time.monotonic()
            if left <= 0 or self.processes[cause].exitcode == 0:
                return first
            self._await_one(left)

    def _cause(self, first: int) -> int | None:
        """Return the index of the process that caused another one's failure; None if it is not one of these."""
        index_of = {_pid(process): index for index, process in enumerate(self.processes)}
        reports = {index_of[each.pid]: each for each in self._failures.reports() if each.pid in index_of}
        if first not in reports:
            return first
        start = reports[first].rank - first  # on a further node, indices and ranks differ
        index_of_rank = {each.rank: index for index, each in reports.items()}
        named = {
            index: [index_of_rank.get(rank, rank - start) for rank in each.failed_ranks]
            for index, each in reports.items()
        }
        failed = [index for index, process in enumerate(self.processes) if process.exitcode]
        cause = root_cause(first, named, failed)
        return cause if 0 <= cause < len(self.processes) else None

    def _first_failure(self, failed: Sequence[int]) -> int | None:
        """Return the index of the process that failed first, given those that have failed.

        It need not be the first to end: a rank may still leave its job while another one, which failed because of it,
        has ended already. A process killed by a signal records no error; errors that it causes are recorded later.
        """
        if not failed:
            return None
        errors = self._failures.errors()
        killed = [index for index in failed if index not in errors]
        return killed[0] if killed else next(iter(errors))

    def _error(self, index: int) -> ProcessException:
        """Return the error of a failed process; all have ended."""
        process, error = self.processes[index], self._failures.errors().get(index)
        pid = _pid(process)
        if error is not None and error.trace:
            return ProcessRaisedException(f"process {index} (pid {pid}) raised:\n\n{error.trace}", index, pid)
        code = error.code if error is not None else process.exitcode or 0
        if code >= 0:
            text = f"process {index} (pid {pid}) terminated with exit code {code}"
            return ProcessExitedException(text, index, pid, code)
        try:
            name = signal.Signals(-code).name
        except ValueError:  # most real-time signals have no name
            name = f"<Unknown signal {-code}>"
        text = f"process {index} (pid {pid}) terminated with signal {name}"
        return ProcessExitedException(text, index, pid, code, name)

    def _end(self, number: signal.Signals, seconds: float = _STOP_SECONDS) -> None:
        """Send a signal to all processes, and SIGKILL to those that have not ended after some seconds."""
        try:
            self._send(number)
            self._await_all(seconds)
        finally:
            self._send(signal.SIGKILL)
            for process in self.processes:
                process.join()
            self.sentinels.clear()
            self._failures.close()

    def _send(self, number: signal.Signals) -> None:
        for process in self.processes:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(_pid(process), number)
                    os.kill(_pid(process), signal.SIGCONT)  # a stopped process receives it only then


SpawnContext = ProcessContext


@functools.cache
def _fresh_token() -> str:
    """Return the random token of all processes started by this one."""
    return secrets.token_hex(32)


def _ending(error: BaseException) -> signal.Signals:
    """Return the signal that terminates the processes after an error in this one."""
    return signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM


def _pid(process: BaseProcess) -> int:
    assert process.pid is not None, "the process has been started"
    return process.pid
