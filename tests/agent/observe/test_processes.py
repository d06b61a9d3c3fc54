"""The processes of ranks, by their environments and their places below a launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from support.processes import wait_until

from rankmesh_agent.observe.processes import python_below, rank_of, ranks_below

pytestmark = pytest.mark.processes

PYTHON = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_a_launcher_a_shell_and_a_program():
    script = '(RANK=1 WORLD_SIZE=2 sh -c \'"$@"; true\' x "$@") & RANK=0 WORLD_SIZE=2 "$@" & wait'
    command = ["sh", "-c", script, "launcher", *PYTHON]
    launcher = subprocess.Popen(command, env={"PATH": os.environ["PATH"]}, start_new_session=True)
    try:
        found = wait_until(lambda: len(ranks := ranks_below(launcher.pid)) == 2 and ranks, "the ranks")
        assert [(found[rank].rank, found[rank].world_size) for rank in (0, 1)] == [(0, 2), (1, 2)]
        assert python_below(found[0].pid) == found[0].pid
        below = wait_until(lambda: (pid := python_below(found[1].pid)) != found[1].pid and pid, "the shell's program")
        process = rank_of(below)
        assert process is not None
        assert (process.pid, process.rank) == (below, 1)
        assert rank_of(launcher.pid) is None
    finally:
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()


def test_a_process_that_has_ended():
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert (rank_of(ended.pid), ranks_below(ended.pid), python_below(ended.pid)) == (None, {}, ended.pid)
