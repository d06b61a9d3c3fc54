"""Installed packages of CuPy: which fit the driver, the remedies, and NCCL as torch brings it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankmesh_agent.device import packages

ROOT = Path(__file__).resolve().parents[3]
COMPILER = shutil.which("g++") or shutil.which("c++")


class Driver:
    """The driver's library, of some CUDA version."""

    def __init__(self, version: int, error: int = 0) -> None:
        self._version, self._error = version, error

    def cuDriverGetVersion(self, version: ctypes._Pointer[ctypes.c_int]) -> int:  # noqa: N802
        version._obj.value = self._version  # type: ignore[attr-defined]
        return self._error


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    packages.driver_cuda_version.cache_clear()


def with_driver(monkeypatch: pytest.MonkeyPatch, driver: Driver | None) -> None:
    def load(name: str) -> Driver:
        assert name == "libcuda.so.1"
        if driver is None:
            raise OSError(f"{name}: cannot open shared object file")
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)
    packages.driver_cuda_version.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str) -> None:
    for name in names:
        record = folder / f"{name.replace('-', '_')}-14.2.0.dist-info"
        record.mkdir()
        (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 14.2.0\n")
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.parametrize(
    ("driver", "version", "hint"),
    [
        (None, 0, "'rankmesh[gpu]' for CUDA 12, 'rankmesh[gpu-cuda13]' for 13"),
        (Driver(12_080, error=1), 0, "'rankmesh[gpu]' for CUDA 12, 'rankmesh[gpu-cuda13]' for 13"),
        (Driver(11_080), 11, "CuPy needs a driver for CUDA 12 or later, this one is for CUDA 11"),
        (Driver(12_080), 12, "pip install 'rankmesh[gpu]' (CuPy for CUDA 12, as the driver)"),
        (Driver(13_000), 13, "pip install 'rankmesh[gpu-cuda13]' (CuPy for CUDA 13, as the driver)"),
        (Driver(14_020), 14, "pip install 'rankmesh[gpu-cuda13]' (CuPy for CUDA 13, as the driver)"),
    ],
)
def test_the_hint_names_the_extra_that_fits_the_driver(
    monkeypatch: pytest.MonkeyPatch, driver: Driver | None, version: int, hint: str
) -> None:
    with_driver(monkeypatch, driver)
    assert packages.driver_cuda_version() == version
    assert hint in packages.install_hint()


@pytest.mark.parametrize(
    ("names", "driver", "package"),
    [
        ([], None, "nccl4py nvidia-nccl-cu12"),
        ([], Driver(13_000), "nccl4py nvidia-nccl-cu13"),
        (["cupy-cuda12x"], Driver(13_000), "nccl4py nvidia-nccl-cu12"),
        (["cupy-cuda13x"], None, "nccl4py nvidia-nccl-cu13"),
        (["cupy"], Driver(13_000), "nccl4py nvidia-nccl-cu13"),
    ],
)
def test_the_hint_for_nccl_fits_the_installed_cupy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, names: list[str], driver: Driver | None, package: str
) -> None:
    with_driver(monkeypatch, driver)
    install(monkeypatch, tmp_path, *names)
    assert packages.nccl_hint() == f"pip install {package}"


def test_two_packages_of_cupy_are_a_conflict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_driver(monkeypatch, Driver(13_000))
    install(monkeypatch, tmp_path, "cupy-cuda13x")
    assert packages.conflict() == ""
    install(monkeypatch, tmp_path, "cupy-cuda12x")
    assert packages.conflict() == (
        "cupy-cuda12x and cupy-cuda13x are installed, of which only one can be: pip uninstall cupy-cuda12x "
        "cupy-cuda13x; pip install 'rankmesh[gpu-cuda13]' (CuPy for CUDA 13, as the driver)"
    )


def test_a_package_for_a_newer_cuda_than_the_drivers_is_a_conflict(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_driver(monkeypatch, Driver(12_080))
    install(monkeypatch, tmp_path, "cupy-cuda13x")
    assert packages.conflict() == (
        "cupy-cuda13x needs a driver for CUDA 13, this one is for CUDA 12: update the driver, or pip uninstall "
        "cupy-cuda13x; pip install 'rankmesh[gpu]' (CuPy for CUDA 12, as the driver)"
    )


BINDINGS = """
import ctypes

def get_version():
    try:
        ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise RuntimeError(error)
"""
PROGRAM = """
import sys
from rankmesh_agent.device import runtime

try:
    print(runtime.nccl() is sys.modules["nccl.bindings.nccl"], "torch" in sys.modules)
except RuntimeError:
    print("none")
"""


@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler for a library")
@pytest.mark.parametrize("place", ["nvidia/nccl/lib", "torch/lib", None])
def test_nccl4py_gets_the_nccl_of_torch(tmp_path: Path, place: str | None) -> None:
    bindings, torch = tmp_path / "nccl" / "bindings", tmp_path / "torch"
    for package in (bindings, torch):
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
    (bindings / "nccl.py").write_text(BINDINGS)
    if place is not None:
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / "empty.cpp").touch()
        library = tmp_path / place / "libnccl.so.2"
        named = ["-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o", str(library), str(tmp_path / "empty.cpp")]
        subprocess.run([str(COMPILER), *named], check=True)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "agent")])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == (["none"] if place is None else ["True", "False"]), done.stderr
