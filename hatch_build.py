"""The build: the project's address in the metadata, and the compiled core.

``REPOSITORY=https://… make wheel`` gives the metadata URLs; without it, they have none. The core is compiled where
there is a C compiler (``CC``, ``CFLAGS``); elsewhere the package is pure Python, and the build says so in one line.
``RANKMESH_NATIVE=0`` leaves it out; with ``RANKMESH_NATIVE=1`` whatever prevents it fails the build, as do warnings.

``python hatch_build.py`` compiles the core of a source tree that is installed as editable.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

ROOT = Path(__file__).parent.resolve()
CORE = Path("agent/rankmesh_agent/native/core.pyx")
MODULE = "core.abi3.so"
# One file serves CPython 3.11 and newer: the limited API. A sum is rounded as NumPy rounds it: no fused multiply-add.
FLAGS = (
    "-shared",
    "-fPIC",
    "-O3",
    "-std=c11",
    "-ffp-contract=off",
    "-fwrapv",
    "-D_GNU_SOURCE",
    "-DPy_LIMITED_API=0x030b0000",
)
C_WARNINGS, CYTHON_WARNINGS = ("-Wall", "-Wextra", "-Werror"), ("-Wextra", "-Werror")


class ProjectUrls(MetadataHookInterface):
    """Adds the URLs of the repository to the metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in ``urls``, which pyproject.toml declares as dynamic."""
        repository = os.environ.get("REPOSITORY", "").rstrip("/")
        metadata["urls"] = {"Repository": repository, "Issues": f"{repository}/issues"} if repository else {}


class CompiledCore(BuildHookInterface[Any]):
    """Adds the compiled core to a wheel, or to the source tree of an editable installation."""

    def dependencies(self) -> list[str]:
        """Return what compiles it."""
        return [] if _obstacle() else ["cython>=3.1"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile it."""
        self._folder = tempfile.mkdtemp(prefix="rankmesh-build-")
        made = ROOT / CORE.with_name(MODULE) if version == "editable" else Path(self._folder, MODULE)
        reason = build_core(made)
        if reason:
            self.app.display_warning(f"no compiled core, all is Python: {reason}")
        elif version != "editable":
            build_data["force_include"][str(made)] = f"rankmesh_agent/native/{MODULE}"
            build_data["pure_python"] = False
            build_data["tag"] = f"cp311-abi3-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what the wheel contains now."""
        shutil.rmtree(self._folder)


def _obstacle() -> str:
    """Return the reason not to compile the core, empty if there is none."""
    setting, platform = os.environ.get("RANKMESH_NATIVE"), sysconfig.get_platform()
    if setting == "0":
        return "RANKMESH_NATIVE=0"
    if setting != "1" and not platform.endswith(("linux-x86_64", "linux-aarch64")):
        return f"this is {platform}, and it is for Linux on x86-64 and aarch64"
    return "" if shutil.which(_compiler()[0]) else f"there is no C compiler {_compiler()[0]}"


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CC") or "cc")


def build_core(made: Path) -> str:
    """Compile the core into a file, and return the reason if there is none; an older file is removed.

    Raises:
        RuntimeError: there is none, and RANKMESH_NATIVE=1.
    """
    required = os.environ.get("RANKMESH_NATIVE") == "1"
    try:
        made.unlink(missing_ok=True)
        reason = _obstacle() or _compile(made, required)
    except OSError as error:  # a source tree that cannot be written
        reason = str(error)
    if reason and required:
        raise RuntimeError(f"RANKMESH_NATIVE=1, but there is no compiled core: {reason}")
    return reason


def _compile(made: Path, required: bool) -> str:
    """Run Cython and the C compiler; the file appears at once, since processes may have mapped an older one."""
    cython = [sys.executable, "-m", "cython", "-3", str(CORE), *(CYTHON_WARNINGS if required else ())]
    compiler = [*_compiler(), *FLAGS, f"-I{sysconfig.get_path('include')}", *(C_WARNINGS if required else ())]
    sources = b"".join(path.read_bytes() for path in sorted((ROOT / CORE).parent.glob("*.p[yx][xi]")))
    compiler += [f"-DSOURCES={zlib.crc32(sources)}u", *shlex.split(os.environ.get("CFLAGS", "-s"))]
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        source, module = Path(folder, "core.c"), Path(folder, MODULE)
        for command, cwd in (([*cython, "-o", source], ROOT), ([*compiler, source.name, "-o", module], folder)):
            done = subprocess.run(
                command, cwd=cwd, text=True, errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            if done.returncode:
                print(done.stdout if required else "", end="", file=sys.stderr)
                lines = done.stdout.splitlines() or [f"{command[0]} ended with code {done.returncode}"]
                return next((line for line in lines if "error" in line.lower()), lines[-1])
        module.replace(made)
    return ""


if __name__ == "__main__":
    reason = build_core(ROOT / CORE.with_name(MODULE))
    print(f"no compiled core, all is Python: {reason}" if reason else f"{MODULE} is built")
