"""The table of docs/stuck-job.md, which tests compare with what the command writes."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import socket
from pathlib import Path

from support.consoles import below
from support.me import Me

_PAGE = Path(__file__).parents[2] / "docs/stuck-job.md"


SCRIPT = "train_loop.py"
CONTROL_GROUPS = next(
    (path for path in (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")) if (path / "cgroup.procs").exists()),
    None,
)
"""Where version 2 of control groups is mounted; None where it is not."""
CAN_FREEZE = CONTROL_GROUPS is not None and os.access(CONTROL_GROUPS / "cgroup.procs", os.W_OK)
LOADER = """
def load_batch():
    return batches.get()
batches = queue.Queue()
"""
DEBUGGED = "subprocess.Popen([sys.executable, '-c', DEBUGGER])\ntime.sleep(3600)"
DEBUGGER = """
DEBUGGER = '''import ctypes, os, signal, time
time.sleep(1)
c, parent = ctypes.CDLL(None), os.getppid()
c.prctl(1, signal.SIGKILL)  # ends with it
for thread in os.listdir(f"/proc/{parent}/task"):
    c.ptrace(16, int(thread), 0, 0)
signal.pause()'''
"""
UNINTERRUPTIBLE = """
def read_disk():
    vfork = 0x4000  # without sharing memory: the parent waits in state D until the child ends
    c, clone = ctypes.PyDLL(None), {"x86_64": 56, "aarch64": 220}[os.uname().machine]
    if c.syscall(clone, vfork | signal.SIGCHLD, 0, 0, 0, 0) == 0:
        c.prctl(1, signal.SIGKILL)  # ends with it
        while True:
            c.pause()
"""
FREEZE = f"""
def freeze():
    group = "{CONTROL_GROUPS}/rankmesh-test-" + str(os.getpid())
    os.mkdir(group)
    open(group + "/cgroup.procs", "w").write(str(os.getpid()))
    with open(group + "/cgroup.freeze", "w") as file:
        file.write("1")
"""
"""Lines before the loop of a stuck script."""


def remove_control_group(pid: int) -> None:
    """Remove the control group that a process has frozen itself in, once it has ended."""
    if CONTROL_GROUPS is not None:
        with contextlib.suppress(OSError):
            (CONTROL_GROUPS / f"rankmesh-test-{pid}").rmdir()


def run_script(me: Me) -> None:
    """Be a rank that runs the script in the test's folder."""
    runpy.run_path(str(me.folder / SCRIPT), run_name="__main__")


def page_rows(column: int = 0) -> dict[str, str]:
    """Return a column of the table, by the kind of stuck job: the command's lines, separated by <br>."""
    lines = below(_PAGE.read_text(), "What it reports").splitlines()
    rows = [line[2:-2].split(" | ") for line in lines if line.startswith("| ")]
    return {title: cells[column] for title, *cells in rows[1:]}


def row_of(output: str) -> str:
    """Return the command's output as a cell of the table; without the remark on young waits."""
    lines = re.sub(r"; the wait is young.*", "", output).splitlines()
    return "<br>".join(line.strip() for line in lines)


def normalized(text: str) -> str:
    """Return a cell with numbers, ids and the host's name replaced, and without the names of the kernel's functions."""
    text = text.replace(f" on {socket.gethostname()}", " on vm")
    text = re.sub(r"group-[0-9a-f]+", "group-N", text)
    text = re.sub(r"waits in the kernel( \(\w+\))?", "waits in the kernel", text)
    return re.sub(r"\d+(\.\d+)?", "N", text)
