"""The wheel: what is in it, and that it works away from the source tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import hatch_build

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


def build(folder: Path, **variables: str) -> tuple[Path, str]:
    """Return a wheel, and what the build printed."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    env = {**os.environ, "RANKMESH_NATIVE": "", **variables}
    done = subprocess.run(command, check=True, env=env, capture_output=True, text=True, timeout=300)
    (made,) = folder.glob("*.whl")
    return made, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))[0]


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_one_compiled_file_serves_all_pythons(wheel: Path) -> None:
    assert "-cp311-abi3-linux_" in wheel.name
    assert "rankmesh_agent/native/core.abi3.so" in zipfile.ZipFile(wheel).namelist()


def test_a_pure_wheel_has_not_even_the_file_of_the_source_tree(tmp_path: Path) -> None:
    pure, output = build(tmp_path, RANKMESH_NATIVE="0")
    assert pure.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(pure).namelist() if name.endswith(".so")]
    assert output.count("no compiled core, all is Python: RANKMESH_NATIVE=0\n") == 1


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("CC", "no-such-cc", "there is no C compiler no-such-cc"),
        ("CFLAGS", "-include no-such-python.h", "error: no-such-python.h: No such file or directory"),
        ("_PYTHON_HOST_PLATFORM", "linux-riscv64", "this is linux-riscv64, and it is for Linux on x86-64 and aarch64"),
    ],
)
def test_what_prevents_the_compiled_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, told: str
) -> None:
    """It is told, and fails no build, unless the core is required; an older file is gone."""
    monkeypatch.setenv("RANKMESH_NATIVE", "")
    monkeypatch.setenv(name, value)
    older = tmp_path / hatch_build.MODULE
    older.touch()
    assert hatch_build.build_core(older).endswith(told)
    assert not list(tmp_path.iterdir())
    if name == "CC":
        monkeypatch.setenv("RANKMESH_NATIVE", "1")
        with pytest.raises(RuntimeError, match="no-such-cc"):
            hatch_build.build_core(older)


def test_only_our_packages_are_at_the_top(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "rankmesh", "rankmesh_agent", "rankmesh_gateway"
    }  # fmt: skip
    assert {f"{package}/py.typed" for package in ("rankmesh", "rankmesh_agent", "rankmesh_gateway")} <= set(names)
    kinds = (".html", ".css", ".js", ".svg", ".json", ".yaml")
    files = [path for room in ("gateway", "sdk") for path in (ROOT / room).rglob("*") if path.suffix in kinds]
    assert {".js", ".html", ".yaml"} <= {path.suffix for path in files}
    assert {"/".join(path.relative_to(ROOT).parts[1:]) for path in files} <= set(names)


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
