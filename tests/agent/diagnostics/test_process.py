"""Processes as others of their host see them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from support.processes import wait_until

from rankmesh_agent.diagnostics.process import usage_of, view

SCRIPT = """\
import ctypes
def work():
    print("there", flush=True)
    {line}
work()
"""
LINES = {
    "computes": "while True: pass",
    "sleeps": "__import__('time').sleep(3600)",
    "holds the lock": "ctypes.PyDLL(None).sleep(3600)",
    "stops": "__import__('os').kill(__import__('os').getpid(), 19)",
}


@pytest.fixture(params=LINES)
def process(request: pytest.FixtureRequest) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A process in one of the states, and its name."""
    script = SCRIPT.format(line=LINES[request.param])
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as found:
        assert found.stdout is not None
        found.stdout.readline()
        yield request.param, found
        found.kill()


def test_state_and_line(process: tuple[str, subprocess.Popen[str]]):
    name, found = process
    state = {"computes": "R", "stops": "T"}.get(name, "S")
    seen = wait_until(
        lambda: seen if (seen := view(found.pid, 10.0)).state == state and seen.stacks else None, f"state {state}"
    )
    (stack,) = seen.stacks
    assert [(frame.function, frame.line, frame.origin) for frame in stack.frames] == [
        ("<module>", 5, "user"),
        ("work", 4, "user"),
    ]
    assert (stack.name, seen.frozen, seen.no_stacks) == ("MainThread", "", "")
    assert seen.cpu > 0 if name == "computes" else seen.cpu == 0


def test_processes_that_have_ended():
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        wait_until(lambda: view(child.pid, 1.0).state == "Z", "the child to end")
    assert view(child.pid, 1.0).state == "-"


def test_what_helps_without_py_spy(process: tuple[str, subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    seen = view(process[1].pid, 1.0)
    assert seen.stacks == []
    assert seen.no_stacks == "pip install 'rankmesh[diagnose]' shows its line"


def test_use_of_resources(process: tuple[str, subprocess.Popen[str]]):
    name, found = process
    state = {"computes": "R", "stops": "T"}.get(name, "S")
    usage = wait_until(
        lambda: each if (each := usage_of(found.pid)) and each.state == state else None, f"state {state}"
    )
    assert usage.memory > 4 << 20
    wait_until(lambda: name != "computes" or usage_of(found.pid).cpu > usage.cpu + 0.1, "it to compute")
    assert usage_of("self").cpu <= time.process_time() + 0.02
    assert usage_of(2**22 + 1) is None
