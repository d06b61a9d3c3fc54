"""Forks the ranks of tests from a process that has imported NumPy, RankMesh and the test modules already.

A fork takes milliseconds where a new interpreter takes 0.4 s of processor time. A forked rank leaves the server's
loop and runs as the main program, so it ends as any program does: exit handlers, exit code, traceback, Ctrl-C.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from support.forked_python import Python

MARKER = "RANKS_OF_TEST"
"""The variable that names the test in the environment of every process that belongs to it."""
LIGHT = "RANK_SERVER_LIGHT"
"""With this variable, a rank has imported what it needs to join, and nothing else."""
_LONGEST = 1 << 18  # bytes of a message
_SECONDS = 180.0  # for the import of a test module, and for the server's end
_PLACEHOLDER = "-" * 64
"""Value of the marker in the server's environment: a rank's replaces it in place."""


class Program(NamedTuple):
    """A function of a test module, as the program of a rank.

    Args:
        file: of the test module.
        module: its name.
        function: its name in the module.
        folder: where marks go.
        arguments: of the function, by name.
    """

    file: str
    module: str
    function: str
    folder: str
    arguments: Mapping[str, Any]

    def load(self) -> ModuleType:
        """Import the test module, once a process."""
        if self.module not in sys.modules:
            spec = importlib.util.spec_from_file_location(self.module, self.file)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[self.module] = module = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[self.module]
                raise
        return sys.modules[self.module]

    def run(self, rank: int, size: int) -> None:
        """Run the function as a rank."""
        from support.me import Me

        function = getattr(self.load(), self.function)
        sys.argv = [self.file, str(rank), str(size)]
        getattr(function, "body", function)(Me(rank, size, self.folder), **self.arguments)


class Fork(NamedTuple):
    """What the server is asked for: a program, and the process to run it in."""

    program: Program | Python
    rank: int
    size: int
    environment: Mapping[str, str]
    streams: Sequence[str]

    def start(self) -> int:
        """Fork a process with these streams; return its id, 0 in it."""
        modes = (os.O_RDONLY, os.O_WRONLY | os.O_APPEND, os.O_WRONLY | os.O_APPEND)
        opened = [os.open(path, mode) for path, mode in zip(self.streams, modes, strict=True)]
        pid = os.fork()
        for number, descriptor in enumerate(opened):
            if not pid:
                os.dup2(descriptor, number)
            os.close(descriptor)
        return pid

    def enter(self) -> None:
        """Make the process that has just been forked one with this environment and folder."""
        _overwrite_environ(self.environment[MARKER])
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.program.folder)


def _overwrite_environ(marker: str) -> None:
    """Replace the marker's value in what /proc/PID/environ shows, which os.environ does not change."""
    value = marker.encode() + b"\0"
    assert len(value) <= len(_PLACEHOLDER)
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47])  # env_start, see proc(5)
    found = Path("/proc/self/environ").read_bytes().index(_PLACEHOLDER.encode())
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start + found)
        memory.write(value)


def serve(connection: socket.socket) -> Fork | None:
    """Fork for each request until the connection ends; return None then, and in a forked process what it is for."""
    wakeup, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken)
    usual = {number: signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGINT)}
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    awaited: list[socket.socket | int] = [connection, wakeup]
    while True:
        readable, _, _ = select.select(awaited, [], [])
        if wakeup in readable:
            os.read(wakeup, 1000)
            while (ended := _wait_any()) is not None:
                connection.send(json.dumps(ended).encode())
            continue
        request = connection.recv(_LONGEST)
        if not request:
            return None
        program, *rest = json.loads(request)
        fork = Fork((Program if len(program) == len(Program._fields) else Python)(*program), *rest)
        try:
            fork.program.load()
            gc.freeze()  # the collector of a fork would otherwise copy the pages of all that is loaded
            pid = fork.start()
        except BaseException as error:
            connection.send(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
            continue
        if not pid:
            signal.set_wakeup_fd(-1)
            for number, handler in usual.items():
                signal.signal(number, handler)
            os.close(wakeup)
            os.close(woken)
            connection.close()
            return fork
        connection.send(json.dumps({"pid": pid}).encode())


def _wait_any() -> dict[str, int] | None:
    with contextlib.suppress(ChildProcessError):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            return {"ended": pid, "code": os.waitstatus_to_exitcode(status)}
    return None


class RankServer:
    """The test's end of a server, which runs until this is closed.

    Args:
        environment: of the server's process. Variables that act when modules are imported act here.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        here, there = socket.socketpair(type=socket.SOCK_SEQPACKET)
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), environment.get("PYTHONPATH")]))
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "support.rank_server", str(there.fileno())],
                env={**environment, MARKER: _PLACEHOLDER, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
            )
        here.settimeout(_SECONDS)
        self._connection = here
        self._lock = threading.Lock()
        self._running: dict[int, ForkedProcess] = {}  # by pid: the system gives a number again after some time

    def start(self, fork: Fork) -> ForkedProcess:
        """Start a rank.

        Raises:
            ImportError: the test module cannot be imported there.
        """
        with self._lock:
            self._connection.send(json.dumps(fork).encode())
            while "pid" not in (answer := self._read()):
                if "error" in answer:
                    raise ImportError(f"{fork.program}: {answer['error']}")
            process = self._running[answer["pid"]] = ForkedProcess(self, answer["pid"])
            return process

    def update(self) -> None:
        """Set the exit codes of the ranks that have ended."""
        with self._lock:
            while select.select([self._connection], [], [], 0)[0]:
                self._read()

    def _read(self) -> dict[str, Any]:
        message = self._connection.recv(_LONGEST)
        assert message, f"the server of ranks ended: exit code {self._process.wait(_SECONDS)}"
        answer: dict[str, Any] = json.loads(message)
        if answer.get("ended") in self._running:
            self._running.pop(answer["ended"]).code = answer["code"]
        return answer

    def close(self) -> None:
        """End the server."""
        self._connection.close()
        try:
            self._process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class ForkedProcess:
    """A forked rank, with the methods of subprocess.Popen that tests use."""

    def __init__(self, server: RankServer, pid: int) -> None:
        self._server = server
        self.pid = pid
        self.code: int | None = None

    def poll(self) -> int | None:
        if self.code is None:
            self._server.update()
        return self.code

    def wait(self, timeout: float = 60) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"rank with pid {self.pid}", timeout)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            # It may end, and the server wait for it, after poll() has asked.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def end_without_teardown() -> None:
    """End a rank that has left its job, as any program ends but for the interpreter's teardown: half of a rank's time.

    Rank 0 of worlds of one rank and of three, and ranks that fail, or are in a job to the end, are taken apart.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


_servers: dict[tuple[tuple[str, str], ...], RankServer] = {}
_FOR_IMPORTS = ("RANKMESH_NATIVE", "PYTHON", "LD_", "MALLOC_", "OMP_", "OPENBLAS_", LIGHT)
_JOIN = ("numpy", "rankmesh", "rankmesh._session.agents", "rankmesh_agent.agent", "encodings.idna", "support.me")
"""What a rank imports until it has joined."""
_SERVE = ("rankmesh_agent.http.app", "rankmesh_gateway.server", "rankmesh.cli")
"""What it imports for its first HTTP client, and what gateways and commands import."""
_TAKEN_APART = (1, 3)


def fork(
    program: Program | Python, rank: int, size: int, environment: Mapping[str, str], streams: Sequence[str]
) -> ForkedProcess:
    """Start a program from the server whose variables for imports are those of its environment.

    Args:
        program: the program.
        rank: its rank.
        size: number of ranks.
        environment: all of its variables.
        streams: paths of its standard streams: files, or another process's descriptors in /proc.
    """
    key = tuple(sorted((name, value) for name, value in environment.items() if name.startswith(_FOR_IMPORTS)))
    if key not in _servers:
        _servers[key] = RankServer(environment)
    return _servers[key].start(Fork(program, rank, size, environment, streams))


def close_all() -> None:
    """End all servers; to be called when the tests are over."""
    while _servers:
        _servers.popitem()[1].close()


if __name__ == "__main__":
    for name in _JOIN if LIGHT in os.environ else (*_JOIN, *_SERVE):
        importlib.import_module(name)
    sys.modules["rankmesh"].__version__  # noqa: B018  # loads all of it
    with socket.socket(fileno=int(sys.argv[1])) as accepted:
        forked = serve(accepted)
    if forked:
        forked.enter()
        forked.program.run(forked.rank, forked.size)
        if (forked.rank or forked.size not in _TAKEN_APART) and not sys.modules["rankmesh"].is_initialized():
            end_without_teardown()
