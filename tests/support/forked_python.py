"""Python programs, as ``python SCRIPT``, ``-m MODULE`` or ``-c TEXT``, in processes that are forked, not executed.

An interpreter that imports NumPy and RankMesh takes 0.3 s of processor time before it begins. A forked program begins
at once, and ends as any program does: exit handlers, exit code, traceback. What differs: its modules are imported, and
its command line in /proc is that of the process which forked it.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

if TYPE_CHECKING:
    from support.rank_server import ForkedProcess

_TORCH = importlib.util.find_spec("torch") is not None
"""Whether torch is installed, which its import by a new interpreter shows in tests: then nothing is forked."""
_OURS = (__file__, runpy.__file__, "<frozen runpy>")


class Python(NamedTuple):
    """An interpreter's command line, as a program.

    Args:
        arguments: after the interpreter's name.
        folder: the working directory.
        forks: whether the programs that it starts by subprocess.Popen are forked, too.
    """

    arguments: Sequence[str]
    folder: str
    forks: bool

    def load(self) -> None:
        """Do nothing: its modules are not known."""

    def run(self, *_: int) -> NoReturn:
        """Run it as the main program, and end the process."""
        if self.forks:
            subprocess.Popen = ForkingPopen  # type: ignore[misc]
        end_with(lambda: _run(list(self.arguments)))


def _run(arguments: list[str]) -> None:
    first, *rest = arguments
    if first == "-m":
        sys.path[0], sys.argv = os.getcwd(), rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = ModuleType("__main__")
    if first == "-c":
        sys.path[0], sys.argv = "", ["-c", *rest[1:]]
        code = compile(rest[0], "<string>", "exec")
    else:
        sys.path[0], sys.argv = os.path.dirname(os.path.realpath(first)), arguments
        main.__file__ = first
        code = compile(Path(first).read_bytes(), first, "exec")
    exec(code, main.__dict__)


def end_with(program: Callable[[], object]) -> NoReturn:
    """Run the main program, and end the process as an interpreter does, but for its teardown."""
    code = 0
    try:
        try:
            program()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            if code and not isinstance(error.code, int):
                print(error.code, file=sys.stderr)
        except BaseException as error:
            trace = error.__traceback__
            while trace and trace.tb_frame.f_code.co_filename in _OURS:
                trace = trace.tb_next
            sys.last_type, sys.last_value, sys.last_traceback = type(error), error.with_traceback(trace), trace
            sys.excepthook(type(error), error, trace)
            code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in sys.stdout, sys.stderr:
            stream.flush()
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
    finally:
        os._exit(code & 0xFF)


class ForkingPopen(subprocess.Popen):  # type: ignore[type-arg]
    """Popen that forks this process to run Python programs."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        _, pass_fds, cwd, env, _, _, _, *pipes = rest
        if isinstance(args, str) or not is_python(args):
            super()._execute_child(args, executable, preexec_fn, *rest)  # type: ignore[misc]
            return
        for stream in sys.stdout, sys.stderr:
            stream.flush()
        self.pid = os.fork()
        if not self.pid:
            end_with(lambda: self._begin(list(args[1:]), preexec_fn, pass_fds, cwd, env, pipes))
        self._child_created = True
        self._close_pipe_fds(*pipes[:6])  # type: ignore[attr-defined]

    def _begin(self, arguments: list[str], before: Any, kept: Any, cwd: Any, env: Any, options: list[Any]) -> None:
        """Make this process, which has just been forked, like one that has been executed, and run the program."""
        stdin, _, _, stdout, _, stderr, *_, new_session, _ = options
        for number, descriptor in enumerate((stdin, stdout, stderr)):
            if descriptor != -1:
                os.dup2(descriptor, number)
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        if new_session:
            os.setsid()
        if before is not None:
            before()
        begin = 3
        for descriptor in sorted(kept):
            os.closerange(begin, descriptor)
            begin = descriptor + 1
        os.closerange(begin, os.sysconf("SC_OPEN_MAX"))
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        if cwd is not None:
            os.chdir(cwd)
        sys.excepthook = sys.__excepthook__
        _run(arguments)


class ForkedPopen(subprocess.Popen):  # type: ignore[type-arg]
    """Popen whose process a rank server forks, for ``[sys.executable, ...]``; all its streams are pipes or files.

    Args:
        command: the interpreter, and its arguments.
        forks: see Python.
        options: Popen's.
    """

    def __init__(
        self, command: Sequence[str], *, forks: bool = True, stdin: int = subprocess.DEVNULL, **options: Any
    ) -> None:
        self._forks = forks
        super().__init__(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        from support.rank_server import MARKER, fork

        self._process: ForkedProcess | None = None
        if not is_python(args):
            super()._execute_child(args, executable, preexec_fn, *rest)  # type: ignore[misc]
            return
        _, _, cwd, env, _, _, _, *pipes = rest
        program = Python(args[1:], str(cwd), self._forks)
        streams = [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in (pipes[0], pipes[3], pipes[5])]
        self._process = fork(program, 0, 0, {MARKER: "python", **env}, streams)
        self.pid = self._process.pid
        self._child_created = True
        self._close_pipe_fds(*pipes[:6])  # type: ignore[attr-defined]

    def _internal_poll(self, *arguments: Any, **named: Any) -> int | None:
        if self._process is None:
            return super()._internal_poll(*arguments, **named)  # type: ignore[misc, no-any-return]
        self.returncode = self._process.poll()
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._process is None:
            return super()._wait(timeout)  # type: ignore[misc, no-any-return]
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.returncode = self._process.wait(1e9 if timeout is None else timeout)
            return self.returncode
        raise subprocess.TimeoutExpired(self.args, timeout or 0)

    def send_signal(self, sig: int) -> None:
        """See Popen."""
        if self._process is None:
            super().send_signal(sig)
        else:
            self._process.send_signal(sig)


def run(command: Sequence[str], *, timeout: float, stdin: Any = None, **options: Any) -> Any:
    """Run a program to its end, as subprocess.run does; return CompletedProcess."""
    pipe = subprocess.DEVNULL if stdin is None else subprocess.PIPE
    with ForkedPopen(command, stdin=pipe, **options) as process:
        try:
            stdout, stderr = process.communicate(stdin, timeout)
        except BaseException:
            process.kill()
            raise
        return subprocess.CompletedProcess(command, process.wait(timeout), stdout, stderr)


def is_python(command: Sequence[str]) -> bool:
    """Return whether a command is one of this interpreter that can be forked."""
    forkable = not command[1].startswith("-") or command[1] in ("-m", "-c")
    return command[0] == sys.executable and forkable and not _TORCH
