"""Ranks as real processes: started with a function to run, watched, and gone when the test is over.

A *body* is a function of a test module, ``def body(me: Me, ...)``, which runs in a process forked by
``support.rank_server``. It talks to the test with ``me.report(...)``, and to the other ranks with marks: files that are
made once and waited for.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import http.server
import inspect
import json
import os
import re
import secrets
import signal
import socket
import string
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from support import hosting
from support.forked_python import Python, is_python
from support.me import DEADLINE, GATEWAY, RANK_FAILED
from support.me import Me as Me  # for annotations of bodies, which the tests import with Ranks
from support.me import wait_until as wait_until
from support.rank_server import MARKER, ForkedProcess, Program, fork

TESTS = Path(__file__).parent.parent
_LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "MPI_LOCAL", "SLURM_", "JOB_COMPLETION_INDEX", "TORCHELASTIC_")
_OF_GATEWAY = (GATEWAY, *(f"RANKMESH_{name}" for name in ("TOKEN", "TLS", "STORE", "BIND", "PRIVATE", "ADVERTISE")))
"""Variables that concern the gateway; worlds with none of them share one, which saves the start of a process each."""
_OURS = ("RANKMESH_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GLOO_", "NCCL_", *_LAUNCHERS)
_SHM = Path("/dev/shm")
_GATEWAY_SECONDS = 20.0
"""Time limit of the end of a gateway that a rank has started, after all ranks."""
_SLOW = re.compile(
    r"^(\[rank \d+\] )?(.* still waits for (the gateway|a standalone agent) .*"
    r"|.* waits for the ranks of job .* to call grow_group\(\), .*|waiting for \d+ of \d+ .* have passed; .*)\n",
    re.MULTILINE,
)
_given_ports: set[int] = set()
Process = subprocess.Popen[bytes] | ForkedProcess


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port nobody listens on, for use in a while; no port twice.

    It is none of those that the kernel gives to who asks for any: another test, at the same time, would be given it.
    Each worker of pytest-xdist has ports of its own.
    """
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ports = range(10_000 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")), end, workers)
    wanted = [secrets.choice(ports) for _ in range(100)] if end > 12_000 else []
    for port in [*(port for port in wanted if port not in _given_ports), 0]:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                _given_ports.add(given := int(probe.getsockname()[1]))
                return given
    raise AssertionError("no port is free")


def complaints_in(printed: str) -> str:
    """Return what ranks printed, without what a rank logs where another one or the gateway is slow."""
    return _SLOW.sub("", printed)


@contextlib.contextmanager
def plain_http_server() -> Iterator[int]:
    """The port of a web server that knows nothing of RankMesh."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Silent)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Silent(http.server.BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


class Rank:
    """A process the test started."""

    def __init__(self, name: str, folder: Path, start: Callable[[Path, Path], Process]) -> None:
        self.name = name
        self._stdout, self._stderr = folder / f"{name}.out", folder / f"{name}.err"
        self._stdout.touch()
        self._stderr.touch()
        self.process = start(self._stdout, self._stderr)
        self.pid = self.process.pid
        self.ended_at = 0.0
        self.signalled = False

    @property
    def code(self) -> int | None:
        """The exit code, None while it runs; minus the signal that ended it."""
        code = self.process.poll()
        if code is not None and not self.ended_at:
            self.ended_at = time.monotonic()
        return code

    @property
    def stdout(self) -> str:
        """What it wrote to standard output so far."""
        return self._stdout.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """What it wrote to standard error so far."""
        return self._stderr.read_text(errors="replace")

    @property
    def complaints(self) -> str:
        """What it wrote to standard error, without what a rank logs where another one or the gateway is slow."""
        return complaints_in(self.stderr)

    @property
    def reported(self) -> dict[str, Any]:
        """Everything it reported so far, merged."""
        merged: dict[str, Any] = {}
        for line in self.stdout.splitlines(keepends=True):
            if line.startswith("{") and line.endswith("\n"):
                merged |= json.loads(line)
        return merged

    def kill(self, number: int = signal.SIGKILL) -> float:
        """Send a signal; return when, by time.monotonic()."""
        now = time.monotonic()
        self.signalled = True
        self.process.send_signal(number)
        return now

    def __repr__(self) -> str:
        return f"--- {self.name}: exit code {self.code}\n{self.stdout}{self.stderr}"


class Ranks:
    """Starts ranks and other processes in a folder, and sees to it that nothing of them is left.

    Args:
        folder: where scripts, outputs and marks go.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.job = f"test-{secrets.token_hex(6)}"
        self.started: list[Rank] = []

    def environment(self, **variables: str) -> dict[str, str]:
        """Return the environment of a process; of ours it inherits whether the compiled core may run."""
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(_OURS) or name == "RANKMESH_NATIVE"
        }
        fixed = {"RANKMESH_JOB": self.job, MARKER: self.job, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        fixed["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # its warnings are of the machine's names and networks
        return {**inherited, **fixed, **variables}

    def program(self, body: Callable[..., Any], arguments: Mapping[str, Any]) -> Program:
        """Return a body as the program of a rank."""
        body = getattr(body, "body", body)
        assert body.__qualname__ == body.__name__, f"{body.__qualname__} is not at the top of its module"
        return Program(inspect.getfile(body), body.__module__, body.__name__, str(self.folder), arguments)

    def script(self, body: Callable[..., Any], **arguments: Any) -> Path:
        """Write a script that runs a body and takes rank and size from its command line, for a launcher."""
        path = self.folder / f"{body.__name__}-{len(self.started)}.py"
        path.write_text(
            "import json, sys\nfrom support.rank_server import Program\n"
            f"program = Program(*json.loads({json.dumps(self.program(body, arguments))!r}))\n"
            "program.run(int(sys.argv[1]), int(sys.argv[2]))\n"
        )
        return path

    def command(self, *arguments: str, name: str, **variables: str) -> Rank:
        """Start a Python process with these arguments."""
        return self.launch([sys.executable, *arguments], name=name, **variables)

    def launch(self, command: Sequence[str], *, name: str, **variables: str) -> Rank:
        """Start a process that finds what the tests import; this interpreter's programs are forked."""

        def start(stdout: Path, stderr: Path) -> Process:
            if is_python(command):
                program = Python(command[1:], str(self.folder), forks=True)
                return fork(program, 0, 0, environment, [os.devnull, str(stdout), str(stderr)])
            with stdout.open("ab") as out, stderr.open("ab") as err:
                return subprocess.Popen(
                    command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err
                )

        environment = self._with_path(variables)
        return self._started(name, start)

    def _with_path(self, variables: dict[str, str]) -> dict[str, str]:
        path = [str(TESTS), variables.pop("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
        return self.environment(PYTHONPATH=os.pathsep.join(filter(None, path)), **variables)

    def _started(self, name: str, start: Callable[[Path, Path], Process]) -> Rank:
        self.started.append(Rank(f"{len(self.started)}-{name}", self.folder, start))
        return self.started[-1]

    def start(
        self,
        body: Callable[..., Any],
        size: int,
        *,
        ranks: Sequence[int] | None = None,
        env: Mapping[str, str] | Callable[[int], Mapping[str, str]] = (),  # type: ignore[assignment]
        **arguments: Any,
    ) -> list[Rank]:
        """Start a body in one process a rank; return them in the order of ``ranks``, by default 0 to size - 1.

        Args:
            body: what they run.
            size: world size.
            ranks: which ranks to start, in this order.
            env: variables of all ranks, or of each.
            arguments: passed to the body.
        """
        program = self.program(body, arguments)

        def start(rank: int, variables: dict[str, str]) -> Rank:
            if hosting.ATTACHED:
                variables[GATEWAY] = hosting.cluster(variables, size).url
            elif not any(name.startswith(_OF_GATEWAY) for name in variables):
                variables[GATEWAY] = f"{hosting.cluster({}, 0, 'gateway').url}?hosting=embedded"
            environment = self._with_path(variables)
            return self._started(
                f"rank-{rank}", lambda *paths: fork(program, rank, size, environment, [os.devnull, *map(str, paths)])
            )

        numbers = range(size) if ranks is None else ranks
        return [start(rank, dict(env(rank) if callable(env) else env)) for rank in numbers]

    def wait(self, started: Sequence[Rank], seconds: float = DEADLINE, *, to_succeed: bool = False) -> None:
        """Wait until these have ended; if all have to succeed, one that fails ends the others' waits for marks."""
        deadline = time.monotonic() + seconds
        running = started
        while running := [rank for rank in running if rank.code is None]:
            if to_succeed and any(rank.code for rank in started):
                self.mark(RANK_FAILED)
            assert time.monotonic() < deadline, f"these still ran after {seconds:g} s:\n{self.transcript()}"
            time.sleep(0.01)

    def succeed(self, started: Sequence[Rank], seconds: float = DEADLINE) -> None:
        """Wait until these have ended, with exit code 0 and no complaints on standard error."""
        self.wait(started, seconds, to_succeed=True)
        failed = [rank for rank in started if rank.code or rank.complaints]
        if failed:
            first = min(failed, key=lambda rank: (rank.code == 0, rank.ended_at))
            raise AssertionError(f"{first.name} failed first:\n{self.transcript()}")

    def run(self, body: Callable[..., Any], size: int, **options: Any) -> list[Rank]:
        """Start a body and wait until all ranks have succeeded."""
        started = self.start(body, size, **options)
        self.succeed(started)
        return started

    def mark(self, name: str) -> None:
        """Make a mark."""
        (self.folder / name).touch()

    def wait_for(self, *names: str) -> None:
        """Wait for marks; fail at once when a process has failed, or all have ended without making them."""
        deadline = time.monotonic() + DEADLINE
        while True:
            # Those that have ended by now have made all their marks.
            failed = [rank.name for rank in self.started if rank.code and not rank.signalled]
            if all(rank.code is not None for rank in self.started):
                failed = failed or [rank.name for rank in self.started]
            missing = [name for name in names if not (self.folder / name).exists()]
            if not missing:
                return
            assert not failed, f"{', '.join(failed)} ended; the marks {missing} are not there:\n{self.transcript()}"
            assert time.monotonic() < deadline, f"waited {DEADLINE:g} s for the marks {missing}:\n{self.transcript()}"
            time.sleep(0.01)

    def transcript(self) -> str:
        """What all processes wrote, for a failing test."""
        return "\n".join(map(repr, self.started))

    def left(self) -> list[str]:
        """Return the processes, and the shared memory, that are still there."""
        processes = []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                variables = Path("/proc", entry, "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"{MARKER}={self.job}".encode() in variables:
                processes.append(entry)
        return processes + [path.name for path in _SHM.glob(f"rankmesh-{self.job}*")]

    def end(self) -> None:
        """Kill what still runs, and fail if anything is left."""
        for rank in self.started:
            if rank.signalled:  # one that a test has killed has closed its sockets a moment before it is seen to end
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rank.process.wait(20)
        running = [rank for rank in self.started if rank.process.poll() is None]
        for rank in running:
            rank.process.kill()
            rank.process.wait()
        told = "\n".join(map(repr, running))
        assert not running, f"these had to be killed:\n{told}"
        deadline = time.monotonic() + _GATEWAY_SECONDS
        while (left := self.left()) and all(map(_is_gateway, left)) and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in filter(str.isdigit, left):
            os.kill(int(pid), signal.SIGKILL)
        for name in left:
            (_SHM / name).unlink(missing_ok=True)
        assert not left, f"these were left: {left}"


def _is_gateway(left: str) -> bool:
    """Return whether what is left is the process of a gateway that a rank has started."""
    try:
        command = Path("/proc", left, "cmdline").read_bytes()
    except OSError:
        return left.isdigit()  # it has just ended
    return not command or b"rankmesh_gateway.child" in command.split(b"\0")


def on_ranks(
    size: int | None = None, env: Mapping[str, str] = {}, run: Callable[..., Any] = Ranks.run
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test function of a module in ``size`` ranks, each a process, all of which have to succeed.

    The function's first argument is the rank's ``Me``; the others are the test's parameters, of types that JSON has.

    Args:
        size: world size; None takes it from the test's parameter ``size``.
        env: variables of the ranks, with the test's parameters in braces: ``{"RANKMESH_TRANSPORT": "{transport}"}``.
        run: runs the ranks, as Ranks.run does.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        of_body = list(inspect.signature(body).parameters)[1:]
        of_env = [field for value in env.values() for _, field, _, _ in string.Formatter().parse(value) if field]
        names = dict.fromkeys([*of_body, *of_env, *(["size"] if size is None else [])])

        @functools.wraps(body)
        def test(ranks: Ranks, **parameters: Any) -> None:
            run(
                ranks,
                body,
                parameters["size"] if size is None else size,
                env={name: value.format(**parameters) for name, value in env.items()},
                **{name: parameters[name] for name in of_body},
            )

        keyword = inspect.Parameter.KEYWORD_ONLY
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, keyword) for name in ["ranks", *names]]
        )
        del test.__wrapped__  # type: ignore[attr-defined]
        test.body = body  # type: ignore[attr-defined]
        return pytest.mark.processes(test)

    return decorate
