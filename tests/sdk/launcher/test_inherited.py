"""Programs whose parent closed the standard streams, blocked or ignores signals: as a shell would have started them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import wait_until

pytestmark = pytest.mark.processes

SECONDS = 180.0
EXEC = "import os, signal, sys\n{}\nos.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
IGNORED = "signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
BLOCKED = "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())"
HERITAGE = {
    "no stdin, SIGCHLD ignored": f"os.close(0); {IGNORED}",
    "no streams, signals blocked": f"os.closerange(0, 3); {BLOCKED}",
    "a full disk": "os.dup2(os.open('/dev/full', os.O_WRONLY), 1); os.dup2(1, 2)",
}
RANK = """
import os, re, signal, sys
status = open("/proc/self/status").read()
blocked, ignored = (int(re.search(f"{name}:\\\\s*(.*)", status)[1], 16) for name in ("SigBlk", "SigIgn"))
rank = os.environ["RANK"]
print("output of", rank)
open(f"masks.{rank}", "w").write(f"{blocked} {ignored >> signal.SIGCHLD - 1 & 1} {ignored >> signal.SIGHUP - 1 & 1}")
sys.exit(int(sys.argv[1]) * int(rank))
"""
SPAWN = """
import os, signal, sys
import rankmesh.multiprocessing as mp

def main(i):
    if i == 0:
        os._exit(7)
    signal.pause()

if __name__ == "__main__":
    try:
        mp.spawn(main, nprocs=2)
    except mp.ProcessExitedException as error:
        open("caught", "w").write(f"{error.error_index} {error.exit_code}")
"""


class Programs:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, heritage: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start Python with these arguments and what a parent hands down."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RANKMESH_")}
        process = subprocess.Popen(
            [sys.executable, "-c", EXEC.format(heritage), *arguments],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.started.append(process)
        return process


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    programs = Programs(tmp_path)
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "spawn.py").write_text(SPAWN)
    yield programs
    for process in programs.started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("heritage", HERITAGE.values(), ids=HERITAGE)
def test_the_launcher_and_its_ranks(programs: Programs, heritage: str) -> None:
    code = 0 if "/dev/full" in heritage else 7
    launcher = programs.start(heritage, "-m", "rankmesh.run", "--nproc-per-node", "2", "rank.py", str(code))
    assert launcher.wait(SECONDS) == (code or 120), "the rank's exit code, or 120 for lost output"
    assert [(programs.folder / f"masks.{rank}").read_text() for rank in range(2)] == ["0 0 0"] * 2


def test_ranks_ignore_sighup_under_nohup(programs: Programs) -> None:
    ignoring = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    assert programs.start(ignoring, "-m", "rankmesh.run", "rank.py", "0").wait(SECONDS) == 0
    assert (programs.folder / "masks.0").read_text() == "0 0 1"


def test_spawn(programs: Programs) -> None:
    assert programs.start(f"{IGNORED}; {BLOCKED}", "spawn.py").wait(SECONDS) == 0
    assert (programs.folder / "caught").read_text() == "0 7"


SERVICES = {
    "gateway": ("-m", "rankmesh_gateway", "--port", "0"),
    "agent": ("-m", "rankmesh_agent", "--port", "0", "--gateway", "http://127.0.0.1:1"),
}


@pytest.mark.parametrize(
    ("service", "heritage"), [("gateway", "no streams, signals blocked"), ("agent", "a full disk")]
)
def test_services(programs: Programs, service: str, heritage: str) -> None:
    process = programs.start(HERITAGE[heritage], *SERVICES[service])
    status = Path(f"/proc/{process.pid}/status")

    def handles_sigterm() -> bool:
        assert process.poll() is None, f"it has ended with {process.returncode}"
        caught = re.search(r"SigCgt:\s*(.*)", status.read_text())
        return caught is not None and bool(int(caught[1], 16) >> signal.SIGTERM - 1 & 1)

    wait_until(handles_sigterm, "the service to start", SECONDS)
    streams = [os.readlink(f"/proc/{process.pid}/fd/{descriptor}") for descriptor in range(3)]
    assert all(stream.startswith("/dev/") for stream in streams), "no socket has the number of a standard stream"
    process.terminate()
    assert process.wait(SECONDS) == 0


def test_the_command_line(programs: Programs) -> None:
    main = "from rankmesh.cli import main; main()"
    assert programs.start("os.closerange(0, 3)", "-c", main, "--help").wait(SECONDS) == 0


def test_the_command_line_on_a_full_disk() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", "from rankmesh.cli import main; main()", "--help"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 5
    assert re.fullmatch(r"rankmesh: .*No space left on device\n", done.stderr)
