"""Processes whose threads gevent has replaced are refused, and the error names gevent."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

DOUBLE = """
import sys, types
sys.modules["gevent.monkey"] = types.SimpleNamespace(is_module_patched=lambda name: name in ("threading", "select"))
import rankmesh as dist
"""
GEVENT = """
from gevent import monkey
monkey.patch_all()
import rankmesh as dist
"""
REAL = pytest.param(GEVENT, marks=pytest.mark.skipif(not importlib.util.find_spec("gevent"), reason="needs gevent"))


@pytest.mark.parametrize(
    "call",
    [
        "dist.init_process_group(init_method='tcp://127.0.0.1:9', rank=0, world_size=2)",
        "dist.TCPStore('127.0.0.1', 0, is_master=True)",
    ],
)
@pytest.mark.parametrize("patched", [DOUBLE, REAL], ids=["double", "gevent"])
def test_a_process_whose_threads_are_greenlets_is_refused_by_name(patched: str, call: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", patched + call], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert message.startswith("rankmesh.DistBackendError: gevent has replaced Python's threading, select"), done.stderr
    assert "without gevent's monkey patching" in message
