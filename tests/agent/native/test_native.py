"""Whether the compiled core is used, by RANKMESH_NATIVE and by what the build found."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rankmesh_agent import native

PACKAGE = Path(native.__file__).parents[1]
BUILT = (PACKAGE / "native/core.abi3.so").exists()
needs_core = pytest.mark.skipif(not BUILT, reason="the compiled core is not built")


def load(setting: str, folder: Path = PACKAGE.parent) -> str:
    code = "from rankmesh_agent import native; print(native.core is not None, native.reason)"
    env = {**os.environ, "RANKMESH_NATIVE": setting, "PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


@needs_core
@pytest.mark.parametrize("setting", ["", "1"])
def test_it_is_used_where_it_is_built(setting: str) -> None:
    assert load(setting) == "True"


@pytest.mark.parametrize(
    ("setting", "reason"), [("0", "RANKMESH_NATIVE is 0"), ("on", "RANKMESH_NATIVE='on' is not a whole number")]
)
def test_the_setting_forbids_it(setting: str, reason: str) -> None:
    assert load(setting) == f"False {reason}"


@needs_core
def test_its_sources_have_changed(tmp_path: Path) -> None:
    copy = shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    assert load("", tmp_path) == "True"
    with (copy / "native/core.pyx").open("a") as source:
        source.write("\n")
    assert load("", tmp_path).startswith("False its sources have changed since it was built")


def test_it_is_not_built_or_of_another_processor(tmp_path: Path) -> None:
    copy = shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    assert load("", tmp_path).startswith("False it was not built at the installation")
    (copy / "native/core.abi3.so").write_bytes(b"of another processor")
    assert load("", tmp_path).startswith(f"False {copy}/native/core.abi3.so: ")
