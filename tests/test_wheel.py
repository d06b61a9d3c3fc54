"""The wheel: what is in it, and that it works away from the source tree."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = """
import numpy as np
import rankmesh as dist
dist.init_process_group()
array = np.ones(10)
dist.all_reduce(array)
print(dist.get_rank(), array[0], dist.__file__)
dist.destroy_process_group()
"""

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    (made,) = folder.glob("*.whl")
    return made


def test_only_our_packages_are_at_the_top(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "rankmesh", "rankmesh_agent", "rankmesh_gateway"
    }  # fmt: skip
    assert {f"{package}/py.typed" for package in ("rankmesh", "rankmesh_agent", "rankmesh_gateway")} <= set(names)
    page = ROOT / "gateway/rankmesh_gateway/dashboard"
    files = [path for path in page.iterdir() if path.suffix in (".html", ".css", ".js", ".svg")]
    assert files
    assert {f"rankmesh_gateway/dashboard/{path.name}" for path in files} <= set(names)


def test_it_works_away_from_the_source_tree(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=300)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launched = subprocess.run(
        [sys.executable, "-m", "rankmesh.launch", "--nproc-per-node", "2", str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert launched.returncode == 0, launched.stderr
    lines = launched.stdout.splitlines()
    assert len(lines) == 2
    assert all("2.0" in line and str(target) in line for line in lines)
