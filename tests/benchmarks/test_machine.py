"""What is said of the machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.machine import Bystanders, busy_seconds, describe, own_seconds, processor

BUSY = "import time\nwhile time.process_time() < 0.3: pass"


def test_machine_is_described() -> None:
    assert {"processor", "kernel", "Python", "NumPy"} <= describe().keys()


def test_processor_without_a_name_is_its_architecture(tmp_path: Path) -> None:
    (tmp_path / "named").write_text("processor: 0\nmodel name\t: Fast One\nmodel name\t: Fast One\n")
    assert processor(tmp_path / "named") == "Fast One"
    assert processor(tmp_path / "absent") == os.uname().machine


def test_idle_and_waiting_for_disks_is_not_busy(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu  100 20 30 4000 500 6 7 8 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
    assert busy_seconds(tmp_path / "stat") == pytest.approx(171 / os.sysconf("SC_CLK_TCK"))


@pytest.mark.processes
def test_children_that_ended_are_our_own() -> None:
    before = own_seconds()
    subprocess.run([sys.executable, "-c", BUSY], check=True)
    assert own_seconds() - before >= 0.3


@pytest.mark.processes
def test_whoever_is_not_ours_is_a_bystander() -> None:
    bystanders = Bystanders()
    with subprocess.Popen([sys.executable, "-c", BUSY + "\ninput()"], stdin=subprocess.PIPE, text=True) as other:
        while not bystanders.cores() > 0.05:  # ours only once it has been waited for
            assert other.poll() is None
        other.communicate("\n")
