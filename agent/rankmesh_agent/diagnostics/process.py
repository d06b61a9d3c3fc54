"""Kernel state and Python stacks of a process of this host, read from outside it; the stacks by py-spy.

The process may be stopped or frozen, held by a debugger, or in C code with the interpreter's lock: it need do nothing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import linecache
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rankmesh_agent.net.callers import OWN_PACKAGES, origin
from rankmesh_agent.net.deadline import Deadline
from rankmesh_agent.wire.schemas import ResourceUsage, StackFrame, ThreadStack
from rankmesh_agent.wire.snapshot import ProcessView

_PROC = Path("/proc")
_FREEZERS = {
    "": [("/sys/fs/cgroup", "cgroup.events", "frozen 1"), ("/sys/fs/cgroup/unified", "cgroup.events", "frozen 1")],
    "freezer": [("/sys/fs/cgroup/freezer", "freezer.state", "FROZEN")],
}
"""By controllers of a line of /proc/PID/cgroup, where the hierarchy may be, and the file and text of a frozen group."""
_SAMPLE_SECONDS = 0.1
_SWAP_BYTES = 64 << 20
"""Memory in swap that is worth a word."""


def view(pid: int, seconds: float) -> ProcessView:
    """Return what can be seen of a process from outside.

    Args:
        pid: the process.
        seconds: time limit of py-spy, which takes some 30 ms.
    """
    began, used = time.monotonic(), run_seconds(pid)
    found = ProcessView(state_of(pid))
    if found.state in ("", "-", "Z", "X"):
        return found
    found.frozen, found.wchan, found.swap_bytes = _frozen(pid), _read(pid, "wchan").strip("0"), _swap_bytes(pid)
    found.stacks, found.no_stacks = _stacks(pid, Deadline(seconds))
    time.sleep(max(0.0, began + _SAMPLE_SECONDS - time.monotonic()))
    found.cpu = max(0.0, run_seconds(pid) - used) / (time.monotonic() - began)
    return found


def state_of(pid: int, proc: Path = _PROC) -> str:
    """Return the state letter of a process on this host; ``-`` if there is none, empty if it cannot be read.

    Args:
        pid: the process.
        proc: mount point of procfs.
    """
    try:
        return (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "-"
    except (OSError, IndexError):
        return ""


def _read(pid: int | str, name: str) -> str:
    try:
        return (_PROC / str(pid) / name).read_text(errors="replace")
    except OSError:
        return ""


def usage_of(pid: int | str = "self") -> ResourceUsage | None:
    """Return the state of a process of this host, by default this one, and what it has used so far; None if unknown."""
    fields, waited = _read(pid, "stat").rpartition(")")[2].split(), _read(pid, "schedstat").split()
    if not fields:
        return None
    faults, user, system, pages = (int(fields[place]) for place in (9, 11, 12, 21))  # see proc(5)
    cpu = (user + system) / os.sysconf("SC_CLK_TCK")
    core_wait = int(waited[1]) * 1e-9 if waited else 0.0
    return ResourceUsage(cpu, core_wait, faults, pages * os.sysconf("SC_PAGE_SIZE"), fields[0])


def run_seconds(pid: int) -> float:
    """Return the seconds that the live threads of a process have run; 0 if they cannot be read."""
    texts = [_read(pid, f"task/{thread.name}/schedstat") for thread in (_PROC / str(pid) / "task").glob("*")]
    return sum(int(text.split()[0]) for text in texts if text) * 1e-9


def _swap_bytes(pid: int) -> int:
    lines = (line.split() for line in _read(pid, "status").splitlines() if line.startswith("VmSwap:"))
    found = next((int(words[1]) << 10 for words in lines), 0)
    return found if found >= _SWAP_BYTES else 0


def _frozen(pid: int) -> str:
    """Return the control group that freezes a process, which the kernel shows as asleep; empty if none does."""
    for line in _read(pid, "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for hierarchy, name, state in _FREEZERS.get(controllers, ()):
            with contextlib.suppress(OSError):
                if state in Path(hierarchy, path.strip("/"), name).read_text():
                    return path
    return ""


def _stacks(pid: int, deadline: Deadline) -> tuple[list[ThreadStack], str]:
    """Return the stacks of a process, the main thread's first; or none, and why."""
    found = shutil.which("py-spy", path=os.path.dirname(sys.executable)) or shutil.which("py-spy")
    if found is None:
        return [], "pip install 'rankmesh[diagnose]' shows its line"
    command = [found, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=max(0.1, deadline.remaining()), check=True)
        threads = [_stack(each, pid) for each in json.loads(done.stdout)]
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        return [], f"py-spy: {lines[-1] if lines else error}"
    except (OSError, ValueError, KeyError, TypeError, subprocess.TimeoutExpired) as error:
        return [], f"py-spy: {error}"
    return sorted(threads, key=lambda each: (each.native_id != pid, each.name, each.native_id)), ""


def _stack(thread: dict[str, Any], pid: int) -> ThreadStack:
    """Return a thread's stack from that of py-spy, which begins with the innermost call."""
    frames = [
        StackFrame(
            frame["filename"],
            frame["line"],
            frame["name"],
            linecache.getline(frame["filename"], frame["line"]).strip(),
            origin(frame["filename"], _own_package(frame["filename"])),
        )
        for frame in reversed(thread["frames"])
    ]
    native = thread["os_thread_id"] or 0
    name = thread["thread_name"] or ("MainThread" if native == pid else _read(pid, f"task/{native}/comm").strip())
    return ThreadStack(name, thread["thread_id"], native, False, frames)


def _own_package(file: str) -> str:
    for name in OWN_PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None and file.startswith(os.path.dirname(spec.origin) + os.sep):
            return name
    return ""
