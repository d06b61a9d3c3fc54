"""Commands on test hosts: as on two machines, each with its own address, name, /etc/hosts and shared memory."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from support.me import wait_until
from support.network_hosts import Host

_ENTER = 'hostname "$1" && mount --bind "$2" /dev/shm && mount --bind "$3" /etc/hosts && shift 3 && exec "$@"'
"""What a process of a host does first, in namespaces of its own for the name and the mounts."""


class Started:
    """A command that runs on a host."""

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str], folder: Path) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """What it wrote so far, to either stream."""
        return self._log.read_text(errors="replace")

    def wait(self, seconds: float = 60.0) -> int:
        """Wait for its end; return the exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self!r} still runs after {seconds:g} s") from None

    def wait_for(self, text: str, seconds: float = 60.0) -> None:
        """Wait until it has written something."""
        wait_until(lambda: text in self.output or self.process.poll() is not None, f"{text!r}: {self!r}", seconds)
        assert text in self.output, self

    def end(self) -> None:
        """Kill what is left of it."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def __repr__(self) -> str:
        return f"--- {self.name}: exit code {self.process.poll()}\n{self.output}"


class Hosts:
    """The hosts: host1 and host2, as the pages call them.

    Args:
        hosts: their namespaces, in order.
        folder: where commands run.
    """

    def __init__(self, hosts: Sequence[Host], folder: Path) -> None:
        self.folder = folder
        self.addresses = {f"host{number}": host.address for number, host in enumerate(hosts, 1)}
        self._hosts = {f"host{number}": host for number, host in enumerate(hosts, 1)}
        self._ports = {f"host{number}": f"p{number - 1}" for number in range(1, len(hosts) + 1)}
        self._switch = f"{hosts[0].namespace.rpartition('-')[0]}-switch"
        self._started: list[Started] = []
        self._names = folder / "etc-hosts"
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in self.addresses.items())]
        self._names.write_text("\n".join(lines) + "\n")

    def start(self, host: str, command: str, **variables: str) -> Started:
        """Start a line of shell on a host."""
        place = self._hosts[host]
        inside = ["unshare", "--uts", "--mount", "sh", "-c", _ENTER, "sh", host, str(place.shm), str(self._names)]
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        # Without a buffer, the lines of two ranks that share an output come in pieces.
        foreign = ("RANKMESH_", "MASTER_", "PYTHONUNBUFFERED")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        started = Started(
            f"{len(self._started)}-{host}",
            ["ip", "netns", "exec", place.namespace, *inside, "bash", "-c", command],
            {**kept, "PATH": path, "OMP_NUM_THREADS": "1", **variables},
            self.folder,
        )
        self._started.append(started)
        return started

    def output(self, host: str, command: str, **variables: str) -> str:
        """Run a line of shell on a host; return what it wrote."""
        done = self.start(host, command, **variables)
        assert done.wait() == 0, done
        return done.output

    def lose(self, host: str, *, but: Started) -> None:
        """Kill all processes of a host at once, except for one command."""
        for pid in self._pids(host):
            if pid != but.process.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def cut(self, host: str) -> None:
        """From now on drop every packet to and from a host: no reset, no 'unreachable'."""
        self._port(host, "nomaster")

    def heal(self, host: str) -> None:
        """Undo it."""
        self._port(host, "master", "br0")

    def transcript(self) -> str:
        """What all commands wrote, for a failing test."""
        return "\n".join(map(repr, self._started))

    def left(self) -> list[str]:
        """Shared memory that is still there."""
        return [path.name for host in self._hosts.values() for path in host.shm.iterdir()]

    def end(self) -> None:
        """End what still runs."""
        for each in self._started:
            each.end()
        deadline = time.monotonic() + 5
        while (running := self._running()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not running, f"these were left: {running}"

    def _port(self, host: str, *what: str) -> None:
        subprocess.run(["ip", "-n", self._switch, "link", "set", self._ports[host], *what], check=True)

    def _pids(self, host: str) -> list[int]:
        command = ["ip", "netns", "pids", self._hosts[host].namespace]
        return [int(pid) for pid in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]

    def _running(self) -> list[int]:
        return [pid for host in self._hosts for pid in self._pids(host)]


def has_torch() -> bool:
    """Return whether torch is installed: to import it may succeed anyway, as tests/torch is a package of that name."""
    found = importlib.util.find_spec("torch")
    return found is not None and found.origin is not None


def why_not() -> str:
    """Return why this machine can make no hosts, or '' if it can."""
    if os.geteuid():
        return "needs root"
    missing = [name for name in ("ip", "unshare", "mount") if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)} (iproute2, util-linux)"
    name = f"rankmesh-{os.getpid()}-probe"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return f"network namespaces cannot be made: {tried.stderr.strip()}" if tried.returncode else ""
