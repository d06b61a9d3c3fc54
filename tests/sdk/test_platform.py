"""Platforms: the import of the package says on which it runs."""

from __future__ import annotations

import subprocess
import sys


def test_another_system_is_refused_by_name() -> None:
    program = "import sys; sys.platform = 'darwin'; import rankmesh"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: RankMesh runs on Linux, and this is darwin:")
