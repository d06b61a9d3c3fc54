"""The ``rankmesh`` command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from rankmesh import cli, launch


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--nproc_per_node", "2", "script.py", "--", "--nproc_per_node", "3"],
        ["-m", "--nnodes=1", "package.module", "--help", "-x", ""],
    ],
)
@pytest.mark.parametrize("command", ["run", "gateway"])
def test_arguments_are_passed_on_untouched(command: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[list[str]] = []

    def main(argv: list[str]) -> int:
        received.append(argv)
        return 7

    served = ModuleType("rankmesh_gateway.__main__")
    served.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rankmesh_gateway.__main__", served)
    monkeypatch.setattr(launch, "main", main)
    result = CliRunner().invoke(cli.app, [command, *arguments])
    assert result.exit_code == 7
    assert received == [arguments]


def test_help_names_the_commands() -> None:
    result = CliRunner().invoke(cli.app, ["--help"])
    assert result.exit_code == 0
    assert "run" in result.stdout
    assert "gateway" in result.stdout


@pytest.mark.processes
def test_the_installed_command_runs_a_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os, sys; print(os.environ['RANK'], *sys.argv[1:]); sys.exit(4)")
    rankmesh = str(Path(sys.executable).with_name("rankmesh"))
    done = subprocess.run(
        [rankmesh, "run", "script.py", "--", "--nproc-per-node=2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout == "[rank 0] 0 -- --nproc-per-node=2\n"
    assert done.returncode == 4
