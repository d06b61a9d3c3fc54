"""Ranks as real processes: started with a function to run, watched, and gone when the test is over.

A *body* is a function of a test module, ``def body(me: Me, ...)``. Its source is written to a script, so the process
imports neither pytest nor the test module; the names it may use besides its arguments are those in HEADER, and the
functions given as ``uses``. It talks to the test with ``me.say(...)``, and to the other ranks with marks: files that
are made once and waited for.
"""

from __future__ import annotations

import contextlib
import errno
import http.server
import inspect
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from support import hosting
from support.me import DEADLINE, GATEWAY
from support.me import Me as Me  # for annotations of bodies, which the tests import with Ranks
from support.me import wait_until as wait_until

TESTS = Path(__file__).parent.parent
HEADER = """\
import json, os, signal, socket, sys, threading, time
import numpy as np
import rankmesh as dist
dist.__version__  # it is loaded when the first name is used: now, and not when a test presses Ctrl-C
from support.me import Me, wait_until
import contextlib
"""
_MARKER = "RANKS_OF_TEST"
_LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "MPI_LOCAL", "SLURM_", "JOB_COMPLETION_INDEX", "TORCHELASTIC_")
_OURS = ("RANKMESH_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GLOO_", "NCCL_", *_LAUNCHERS)
_SHM = Path("/dev/shm")


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port nobody listens on, for use in a while.

    It is none of those that the kernel gives to who asks for any: another test, at the same time, would be given it.
    """
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    wanted = [secrets.randbelow(end - 10_000) + 10_000 for _ in range(100)] if end > 12_000 else []
    for port in [*wanted, 0]:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return int(probe.getsockname()[1])
    raise AssertionError("no port is free")


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

    def __init__(self, name: str, folder: Path, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self._stdout, self._stderr = folder / f"{name}.out", folder / f"{name}.err"
        with self._stdout.open("wb") as stdout, self._stderr.open("wb") as stderr:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr
            )
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
    def said(self) -> dict[str, Any]:
        """Everything it said so far, merged."""
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
        """Return the environment of a process: none of ours is inherited."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
        fixed = {"RANKMESH_JOB": self.job, _MARKER: self.job, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        fixed["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # its warnings are of the machine's names and networks
        return {**inherited, **fixed, **variables}

    def script(
        self, body: Callable[..., Any], *, arguments: Mapping[str, Any], uses: Sequence[Callable[..., Any]]
    ) -> Path:
        """Write the script of a body, which takes rank and size from its command line."""
        path = self.folder / f"{body.__name__}-{len(self.started)}.py"
        sources = [textwrap.dedent(inspect.getsource(function)) for function in (*uses, body)]
        call = (
            f"{body.__name__}(Me(int(sys.argv[1]), int(sys.argv[2]), {str(self.folder)!r}), "
            f"**json.loads({json.dumps(dict(arguments))!r}))\n"
        )
        path.write_text("\n\n".join(["from __future__ import annotations\n" + HEADER, *sources, call]))
        return path

    def command(self, *arguments: str, name: str, **variables: str) -> Rank:
        """Start a Python process with these arguments."""
        return self.launch([sys.executable, *arguments], name=name, **variables)

    def launch(self, command: Sequence[str], *, name: str, **variables: str) -> Rank:
        """Start a process that finds what the tests import."""
        path = os.pathsep.join(
            filter(None, [str(TESTS), variables.pop("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")])
        )
        environment = self.environment(PYTHONPATH=path, **variables)
        rank = Rank(f"{len(self.started)}-{name}", self.folder, command, environment)
        self.started.append(rank)
        return rank

    def start(
        self,
        body: Callable[..., Any],
        size: int,
        *,
        ranks: Sequence[int] | None = None,
        env: Mapping[str, str] | Callable[[int], Mapping[str, str]] = (),  # type: ignore[assignment]
        uses: Sequence[Callable[..., Any]] = (),
        **arguments: Any,
    ) -> list[Rank]:
        """Start a body in one process a rank; return them in the order of ``ranks``, by default 0 to size - 1.

        Args:
            body: what they run.
            size: world size.
            ranks: which ranks to start, in this order.
            env: variables of all ranks, or of each.
            uses: other functions the body calls.
            arguments: passed to the body.
        """
        script = self.script(body, arguments=arguments, uses=uses)
        started = range(size) if ranks is None else ranks
        variables = {rank: dict(env(rank) if callable(env) else env) for rank in started}
        if hosting.ATTACHED:
            for own in variables.values():
                own[GATEWAY] = hosting.cluster(own, size).url
        return [
            self.command(str(script), str(rank), str(size), name=f"rank-{rank}", **variables[rank]) for rank in started
        ]

    def wait(self, started: Sequence[Rank], seconds: float = DEADLINE) -> None:
        """Wait until these have ended."""
        deadline = time.monotonic() + seconds
        running = started
        while running := [rank for rank in running if rank.code is None]:
            assert time.monotonic() < deadline, f"these still ran after {seconds:g} s:\n{self.told()}"
            time.sleep(0.01)

    def succeed(self, started: Sequence[Rank], seconds: float = DEADLINE) -> None:
        """Wait until these have ended, with exit code 0 and nothing on standard error."""
        self.wait(started, seconds)
        assert all(rank.code == 0 and not rank.stderr for rank in started), self.told()

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
        while missing := [name for name in names if not (self.folder / name).exists()]:
            failed = [rank.name for rank in self.started if rank.code and not rank.signalled]
            if not failed and all(rank.code is not None for rank in self.started):
                missing = [name for name in missing if not (self.folder / name).exists()]  # as a last word
                failed = [rank.name for rank in self.started] if missing else []
            assert not failed, f"{', '.join(failed)} ended; the marks {missing} are not there:\n{self.told()}"
            assert time.monotonic() < deadline, f"waited {DEADLINE:g} s for the marks {missing}:\n{self.told()}"
            time.sleep(0.01)

    def told(self) -> str:
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
            if f"{_MARKER}={self.job}".encode() in variables:
                processes.append(entry)
        return processes + [path.name for path in _SHM.glob(f"rankmesh-{self.job}*")]

    def end(self) -> None:
        """Kill what still runs, and fail if anything is left."""
        running = [rank for rank in self.started if rank.process.poll() is None]
        for rank in running:
            rank.process.kill()
            rank.process.wait()
        told = "\n".join(map(repr, running))
        assert not running, f"these had to be killed:\n{told}"
        left = self.left()
        for pid in filter(str.isdigit, left):
            os.kill(int(pid), signal.SIGKILL)
        for name in left:
            (_SHM / name).unlink(missing_ok=True)
        assert not left, f"these were left: {left}"
